"""One rank of ``rpg-megatron audit``, started by the launcher.

``python -m rpg_megatron.commands.audit.rank RUN_DIR WORK_DIR BRIDGE_DIR``
"""

from __future__ import annotations

from rpg_megatron.training.rank import RankProcess, run_rank


def _audit(rank: RankProcess) -> None:
    from rpg_megatron.commands.audit.compare_engines import audit
    from rpg_megatron.training.run import RankRun

    audit(rank.start_run(RankRun), rank.run_dir, rank.work, rank.bridge, rank.token)


if __name__ == "__main__":
    run_rank(_audit)

"""One rank of ``rpg-megatron replay``, started by the launcher.

``python -m rpg_megatron.commands.replay.rank RUN_DIR WORK_DIR BRIDGE_DIR``
"""

from __future__ import annotations

from rpg_megatron.system.events import EVENTS, EventSender
from rpg_megatron.training.rank import RankProcess, run_rank


def _replay(rank: RankProcess) -> None:
    from rpg_megatron.commands.replay.compare_steps import replay
    from rpg_megatron.training.trainer import Trainer

    trainer = Trainer(rank.settings, rank.mesh, rank.device)
    replay(trainer, rank.run_dir, EventSender(rank.work / EVENTS))


if __name__ == "__main__":
    run_rank(_replay)

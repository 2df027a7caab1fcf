"""One rank of ``rpg-megatron audit`` or ``rpg-megatron replay``, started by the launcher.

``python -m rpg_megatron.commands.rank RUN_DIR WORK_DIR BRIDGE_DIR``
"""

from __future__ import annotations

import json
from typing import Any

from rpg_megatron.commands.rank_job import report_file, request_file
from rpg_megatron.config.files import atomic_write_text, read_json
from rpg_megatron.training.rank import RankProcess, run_rank


def _work(rank: RankProcess) -> None:
    """Do what the request in the folder asks for; rank 0 writes the report."""
    command = next(name for name in _JOBS if request_file(rank.run_dir, name).exists())
    report = _JOBS[command](rank, read_json(request_file(rank.run_dir, command)))
    if rank.mesh.rank == 0:
        atomic_write_text(report_file(rank.run_dir, command), json.dumps(report, indent=2) + "\n")


def _audit(rank: RankProcess, request: dict[str, Any]) -> dict[str, Any]:
    from rpg_megatron.commands.audit.compare_engines import AuditRequest, audit

    return audit(rank, AuditRequest(**request))


def _replay(rank: RankProcess, request: dict[str, Any]) -> dict[str, Any]:
    from rpg_megatron.commands.replay.compare_steps import ReplayRequest, replay
    from rpg_megatron.system.events import EVENTS, EventSender
    from rpg_megatron.training.trainer import Trainer

    trainer = Trainer(rank.settings, rank.mesh, rank.device)
    return replay(trainer, ReplayRequest(**request), EventSender(rank.work / EVENTS))


_JOBS = {"audit": _audit, "replay": _replay}

if __name__ == "__main__":
    run_rank(_work)

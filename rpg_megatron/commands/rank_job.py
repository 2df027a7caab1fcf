"""Work that trainer ranks do for a command other than ``train``: a request goes in, a report comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings
from rpg_megatron.config.files import atomic_write_text, read_json, remove
from rpg_megatron.launcher.run import RunLauncher
from rpg_megatron.launcher.stopping import Interrupted, StopSignals
from rpg_megatron.launcher.summary import display_path

RANK = "rpg_megatron.commands.rank"
"""What each rank runs."""
WEIGHTS = "weights"
"""Folder of a job in which its ranks keep the model while they work."""


def request_file(folder: Path, command: str) -> Path:
    """What the launcher asks for. folder: the job's. command: audit or replay."""
    return folder / f"{command}_request.json"


def report_file(folder: Path, command: str) -> Path:
    """What rank 0 found."""
    return folder / f"{command}.json"


def run_ranks(
    command: str, settings: Settings, signals: StopSignals, request: dict[str, Any], **options: Any
) -> tuple[Path, dict[str, Any]]:
    """Start the processes of a run in a folder of their own, and wait; returns the folder and the report.

    options: of ``RunLauncher``. Raises UserError, RunFailed or Interrupted as ``commands.train`` does.
    """
    signals.raising = False  # from here on, resources must be cleaned up
    with RunLauncher(settings, signals, rank_module=RANK, fresh=True, **options) as run:
        atomic_write_text(request_file(run.folder, command), json.dumps(request))
        try:
            run.start()
            run.watch()
        except Interrupted as e:
            e.note = f"the {command}'s folder is kept: {display_path(run.folder)}"
            raise
        finally:
            remove(run.folder / WEIGHTS, ignore_errors=True)
        report: dict[str, Any] = read_json(report_file(run.folder, command))
    return run.folder, report

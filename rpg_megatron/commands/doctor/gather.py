"""Under ``srun``: every node examines itself, and the first one gathers what they found.

Nodes report through files in the folder of the runs, which they must share anyway: one that cannot write
there, or does not come in time, is a failed check of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rpg_megatron.commands.doctor.machine import SKEW_SECONDS
from rpg_megatron.commands.doctor.probe import Check, failed
from rpg_megatron.system.files import atomic_write_text

WAIT_SECONDS = 60.0
"""How long the first node waits for the others when it is done itself."""


@dataclass(frozen=True)
class Team:
    """The tasks of a job step, as seen from one of them."""

    task: int
    tasks: int
    step: str
    """What all tasks of this step have in common and no other has."""

    @property
    def first(self) -> bool:
        """Prints the report."""
        return self.task == 0


@dataclass(frozen=True)
class NodeReport:
    """What one node found."""

    node: str
    checks: tuple[Check, ...]


def find_team(environment: Mapping[str, str] = os.environ) -> Team:
    """From Slurm's environment; a team of one outside a step that ``srun`` started.

    A batch script has the job's task count in its environment but is no step.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return Team(0, 1, "")
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    parts = [environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return Team(int(environment["SLURM_PROCID"]), tasks, "-".join(parts))


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """This node, as Slurm calls it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def send_report(team: Team, folder: Path, checks: list[Check]) -> bool:
    """Leave this node's report for the first one; says whether that was possible."""
    report = {"node": node_name(), "time": time.time(), "checks": [asdict(c) for c in checks]}
    try:
        meeting = _meeting(team, folder)
        meeting.mkdir(mode=0o700, exist_ok=True)
        atomic_write_text(meeting / f"task-{team.task}.json", json.dumps(report), private=True)
    except OSError:
        return False
    return True


def gather_reports(
    team: Team, folder: Path, checks: list[Check], *, wait: float = WAIT_SECONDS, started: float
) -> list[NodeReport]:
    """All nodes' reports, this one's first. started: Unix time at which this task began to examine.

    Takes at most ``wait`` seconds. Each report was written after the step began and before it was seen
    here; a time stamp outside of that means clocks that differ.
    """
    reports = {0: NodeReport(node_name(), tuple(checks))}
    meeting = _meeting(team, folder)
    end = time.monotonic() + wait
    while len(reports) < team.tasks and time.monotonic() < end:
        for task in set(range(team.tasks)) - set(reports):
            with suppress(OSError, ValueError, KeyError, TypeError):
                raw = json.loads((meeting / f"task-{task}.json").read_text(encoding="utf-8"))
                found = [Check(**c) for c in raw["checks"]]
                skew = _skew(float(raw["time"]), started, time.time())
                reports[task] = NodeReport(raw["node"], (*found, *skew))
        time.sleep(0.1)
    for task in set(range(team.tasks)) - set(reports):
        silent = failed(
            "report",
            f"nothing heard within {wait:.0f} s",
            f"log in there: does it see {folder}, can it write to it, and did the command start?",
        )
        reports[task] = NodeReport(f"task {task}", (silent,))
    shutil.rmtree(meeting, ignore_errors=True)
    return [reports[task] for task in sorted(reports)]


def _skew(stamp: float, earliest: float, latest: float) -> list[Check]:
    """A failed check if a time stamp lies outside of what it must lie in."""
    # Tasks of a step do not start at the very same moment.
    off = max(stamp - latest, earliest - stamp)
    if off <= SKEW_SECONDS:
        return []
    fix = "start the time service on this node (chronyc tracking shows its state)"
    return [failed("clock between nodes", f"at least {off:.0f} s off the first node's", fix)]


def _meeting(team: Team, folder: Path) -> Path:
    return folder / f".doctor-{team.step}"

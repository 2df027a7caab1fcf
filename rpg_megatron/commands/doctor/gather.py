"""Under ``srun``: every node checks itself, and the first one gathers the reports.

Nodes report through files in the folder of the runs, which they must share anyway. A node that cannot write
there, or does not report in time, is a failed check.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rpg_megatron.commands.doctor.machine import SKEW_SECONDS
from rpg_megatron.commands.doctor.probe import Check, failed
from rpg_megatron.config.files import atomic_write_text, read_json, remove

WAIT_SECONDS = 60.0
"""How long the first node waits for the others after its own checks."""


@dataclass(frozen=True)
class JobStep:
    """The tasks of a job step, as seen from one of them."""

    task: int
    tasks: int
    id: str
    """Unique to this step, and the same for all of its tasks."""

    @property
    def first(self) -> bool:
        """Whether this task prints the report."""
        return self.task == 0


@dataclass(frozen=True)
class NodeReport:
    """The checks of one node."""

    node: str
    checks: tuple[Check, ...]


def find_job_step(environment: Mapping[str, str] = os.environ) -> JobStep:
    """From Slurm's environment; a single task if ``srun`` did not start this process.

    A batch script has the job's task count in its environment but is not a step.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return JobStep(0, 1, "")
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    parts = [environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return JobStep(int(environment["SLURM_PROCID"]), tasks, "-".join(parts))


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """This node's name in Slurm, else its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def send_report(step: JobStep, folder: Path, checks: list[Check]) -> bool:
    """Write this node's report for the first node; returns whether that worked."""
    report = {"node": node_name(), "time": time.time(), "checks": [asdict(c) for c in checks]}
    try:
        reports_dir = report_dir(step, folder)
        reports_dir.mkdir(mode=0o700, exist_ok=True)
        atomic_write_text(reports_dir / f"task-{step.task}.json", json.dumps(report), private=True)
    except OSError:
        return False
    return True


def gather_reports(
    step: JobStep, folder: Path, checks: list[Check], *, wait: float = WAIT_SECONDS, started: float
) -> list[NodeReport]:
    """All nodes' reports, this one's first. started: Unix time at which this task started.

    Takes at most ``wait`` seconds. Each report is written after the step started and before it is read here;
    a time stamp outside that interval means that the clocks differ.
    """
    reports = {0: NodeReport(node_name(), tuple(checks))}
    reports_dir = report_dir(step, folder)
    end = time.monotonic() + wait
    while len(reports) < step.tasks and time.monotonic() < end:
        for task in set(range(step.tasks)) - set(reports):
            with suppress(OSError, ValueError, KeyError, TypeError):
                raw = read_json(reports_dir / f"task-{task}.json")
                reported = [Check(**c) for c in raw["checks"]]
                skew = _skew(float(raw["time"]), started, time.time())
                reports[task] = NodeReport(raw["node"], (*reported, *skew))
        time.sleep(0.1)
    for task in set(range(step.tasks)) - set(reports):
        silent = failed(
            "report",
            f"no report within {wait:.0f} s",
            f"log in to the node; check that it can write to {folder} and that the command started",
        )
        reports[task] = NodeReport(f"task {task}", (silent,))
    remove(reports_dir, ignore_errors=True)
    return [reports[task] for task in sorted(reports)]


def _skew(stamp: float, earliest: float, latest: float) -> list[Check]:
    """A failed check if a time stamp is outside the interval."""
    # Tasks of a step do not start at exactly the same time.
    off = max(stamp - latest, earliest - stamp)
    if off <= SKEW_SECONDS:
        return []
    fix = "start the time service on this node (chronyc tracking shows its state)"
    return [failed("clock between nodes", f"at least {off:.0f} s off the first node's", fix)]


def report_dir(step: JobStep, folder: Path) -> Path:
    """The folder in that of the runs through which the tasks of a step exchange files."""
    return folder / f".doctor-{step.id}"

"""Why a run failed, in one line, and whether starting it again may help.

A failure of the machine (a lost node, a process that a signal killed, an error of NCCL, gloo, a GPU or a
file system) may not recur on other nodes. The job script then requeues the job: it sets
``RPG_RESTART_FILE``, into which the launcher writes how long to wait, and which nodes to leave out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings
from rpg_megatron.config.cluster import JobSettings
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.launcher.environment import ends_of_starts, record_end
from rpg_megatron.launcher.run_dir import finished_steps, list_runs
from rpg_megatron.system.child import ProcessStatus, describe_end, tail_of

RESTART_FILE = "RPG_RESTART_FILE"
"""Environment variable with the file that the job script reads: seconds to wait, then nodes to leave out."""
_BACKOFF, _LONGEST_WAIT = 120.0, 3600.0
"""Seconds before the first restart, doubled for each further one, and the most. Slurm itself holds a
requeued job for 120."""
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?|\(\w+ pid=\d+\) )?"
    r"(?:[\w.]+(?:Error|Exception)\b|terminate called|\s+what\(\):|.*Watchdog caught).*"
)
"""A line that says what a process died of."""
_NETWORK = re.compile(
    r"Watchdog caught collective operation timeout|NCCL error|nccl(?:System|Remote|Internal)Error"
    r"|Dist(?:Backend|Network|Store)Error|Connection (?:closed by|reset by) peer|Connection refused"
    r"|Application timeout caused pair closure|Timed out waiting \d+ms|Broken pipe|No route to host",
)
_HARDWARE = re.compile(
    r"ECC error|fallen off the bus|device is lost|unspecified launch failure|busy or unavailable|NVLink"
    r"|no CUDA-capable device|No CUDA GPUs are available|CUDA driver initialization failed"
    r"|system not yet initialized|Stale file handle|Input/output error|Remote I/O error"
    r"|Transport endpoint is not connected|Bus error",
    re.IGNORECASE,
)


class RunProcess(ProcessStatus, Protocol):
    """A process of a run, on any node."""

    host: str
    """Name of its node."""


@dataclass(frozen=True)
class Failure:
    """Why a run failed."""

    cause: str
    """One line."""
    machine: bool = False
    """Whether it is a failure of the machine, not of the program or its input."""
    nodes: tuple[str, ...] = ()
    """Host names of the nodes that may have caused it."""
    error: str = ""
    """The process and its error, if its log has one: the first of what may be many."""


def judge(dead: Sequence[RunProcess]) -> Failure:
    """The failure that ended these processes, the most likely cause first.

    It is the machine's if it explains all of them: a process that dies of an error of its own breaks the
    connections of the others.
    """
    ends = [(process, *_end_of(process)) for process in dead]
    machine = all(kind is not None for _, kind, _ in ends)
    # The error of a program comes before the broken connections that it causes.
    process, _, error = next((end for end in ends if end[1] is None), ends[0])
    suspects = [p.host for p, kind, _ in ends if kind == "process"]
    cause = f"{process.name} {describe_end(process)}"
    return Failure(
        f"{cause}: {error}" if error else cause,
        machine,
        tuple(dict.fromkeys(suspects)) if machine else (),
        f"{process.name}: {error}" if error else "",
    )


def judge_engine(cause: str, engine: RunProcess) -> Failure:
    """The failure of an engine that cannot be used any more."""
    error = _last_error(engine)
    machine = _HARDWARE.search(error) is not None
    return Failure(f"{cause}: {error}" if error else cause, machine, (engine.host,) if machine else ())


def _last_error(process: ProcessStatus) -> str:
    tail = tail_of(process.log, 200, process.opened, process.log_start)
    errors = [line for line in tail.splitlines() if _ERROR.match(line)]
    return shorten(errors[-1].strip(), 300) if errors else ""


def _end_of(process: ProcessStatus) -> tuple[str | None, str]:
    """Kind of a process's end, and its error, if it has one. Kinds: "network"; "process", whose node is
    suspect; None: not the machine's.
    """
    last = _last_error(process)
    if _NETWORK.search(last):
        return "network", last
    if (process.exit_code() or 0) < 0 or _HARDWARE.search(last):
        return "process", last
    return None, last


def note_failure(settings: Settings, failure: Failure, step: int | None = None) -> str:
    """Ask the job script to start the job again, unless that was done ``job.max_restarts`` times in vain.

    step: of the newest checkpoint of this start's run, which has recorded the failure; None: there is no such
    run, and the newest unfinished one of this name records it. A run without a checkpoint is not resumed, so
    the starts of all runs of this name count. Returns a line for the user; empty if no job script asks for
    it, or if the failure is not the machine's.
    """
    place = os.environ.get(RESTART_FILE)
    if not failure.machine or not place:
        return ""
    runs = list_runs(settings)
    if step is None:
        step = 0
        if runs and finished_steps(runs[0]) is None:
            step = next(iter(list_steps(runs[0])), 0)
            record_end(runs[0], failure.cause, step, failure.nodes)
    ends = [end for run in reversed(runs) for end in ends_of_starts(run)]
    return request_restart(Path(place), ends, step, settings.job)


def request_restart(place: Path, ends: Sequence[Mapping[str, Any]], step: int, job: JobSettings) -> str:
    """See ``note_failure``. place: the job script's file. ends: those of the starts, this one's last; each
    has ``failure``, ``step`` and ``nodes`` if it was a failure of the machine.
    """
    count = 0
    nodes: list[str] = []
    for end in reversed(ends):
        if "failure" not in end or end.get("step") != step:
            break
        count += 1
        nodes += [node for node in end.get("nodes", ()) if isinstance(node, str)]
    count = max(count, 1)  # nothing could be recorded
    if count > job.max_restarts:
        return (
            f"not started again: it has failed {count} times without a new checkpoint "
            f"(job.max_restarts {job.max_restarts})"
        )
    seconds = min(_BACKOFF * 2 ** (count - 1), _LONGEST_WAIT)
    without = ",".join(sorted(set(nodes)))
    with suppress(OSError):
        atomic_write_text(place, f"{seconds:.0f} {without}\n", private=True)
        left_out = f", without {without}" if without else ""
        return f"restart {count} of {job.max_restarts} in {seconds:.0f} s{left_out}"
    return f"not started again: {place} cannot be written"

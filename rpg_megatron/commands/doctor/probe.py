"""Probes and their checks; runs probes so that none can block the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.launcher.preflight import has_gpu

Verdict = Literal["ok", "failed", "warning", "not applicable"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    found: str
    """What was found."""
    fix: str = ""
    """What to do; never empty for a failed check."""


@dataclass(frozen=True)
class Subject:
    """What the probes check."""

    settings: Settings | None
    """None: only the machine, without a run."""
    shape: ModelShape | None
    """None without settings, or if the model cannot be read."""

    @property
    def device(self) -> str:
        """The device in the settings; without settings, cuda if the machine has a GPU."""
        if self.settings is not None:
            return self.settings.device
        return "cuda" if has_gpu() else "cpu"


Probe = Callable[[Subject], Iterator[Check]]


def ok(name: str, found: str) -> Check:
    """A check that passed."""
    return Check(name, "ok", found)


def failed(name: str, found: str, fix: str) -> Check:
    """A check that failed."""
    return Check(name, "failed", found, fix)


def warning(name: str, found: str, fix: str) -> Check:
    """A problem that does not prevent a run."""
    return Check(name, "warning", found, fix)


def not_applicable(name: str, why: str) -> Check:
    """A check that does not apply here."""
    return Check(name, "not applicable", why)


def of_message(name: str, text: object, check: Callable[[str, str, str], Check] = failed) -> Check:
    """A failed check, or a warning, from a message of the form "what is wrong; what to do"."""
    problem, semicolon, fix = str(text).rpartition("; ")
    otherwise = "fix what the message names" if check is failed else ""
    return check(name, problem, fix) if semicolon else check(name, fix, otherwise)


def run_probes(probes: Sequence[tuple[str, float, Probe]], subject: Subject) -> list[Check]:
    """Run all probes at once; returns their checks in the order of the probes.

    Each probe is (name, timeout in seconds, function). A probe that times out or raises is a failed check of
    its name: a hanging file system blocks a thread, but not the report.
    """
    started = time.monotonic()
    answers: list[queue.SimpleQueue[list[Check]]] = []
    for name, _, probe in probes:
        answers.append(queue.SimpleQueue())
        threading.Thread(target=_run, args=(name, probe, subject, answers[-1]), daemon=True).start()
    checks: list[Check] = []
    for (name, limit, _), answer in zip(probes, answers, strict=True):
        try:
            checks += answer.get(timeout=max(0.0, started + limit - time.monotonic()))
        except queue.Empty:
            fix = "check for a hanging file system or tool, or data that take longer to read"
            checks.append(failed(name, f"no answer within {limit:.0f} s", fix))
    return checks


def _run(name: str, probe: Probe, subject: Subject, answer: queue.SimpleQueue[list[Check]]) -> None:
    checks: list[Check] = []
    try:
        for check in probe(subject):
            checks.append(check)
    except UserError as e:
        checks.append(of_message(name, e))
    except Exception as e:
        fix = "an internal error of this check: report it with this line"
        checks.append(failed(name, f"{type(e).__name__}: {e}", fix))
    answer.put(checks)

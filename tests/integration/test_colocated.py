"""Colocated engines and trainer give the same results as separate ones, bit for bit.

Why: an engine that is woken before it has its weights, a moment that is lost on its way to host memory, or a
checkpoint of an offloaded state would each train on without an error. Proved on a CPU with real engines and
two trainer ranks, fp32: a run of four steps whose engines sleep and wake around every update ends with the
weights, rollouts, evaluations and metrics of one whose engines stay awake; so does one that was warned in the
middle, saved, and resumed. vLLM's states and routes are its own, but on a CPU its workers keep their memory.
Not covered: GPUs (tests/gpu), where the memory is really freed.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from rpg_megatron.system import process_groups
from tests.support.commands import Command
from tests.support.runs import Run, assert_same

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 4
SETTINGS = [
    f"training.steps={STEPS}",
    "evaluation.every=2",
    "optimizer.distributed=true",
]
COLOCATED = ["engine.colocated=true", "checkpoint={every: 1, keep: 1}"]


class ShortRun(Run):
    """A run of these settings and more."""

    def __init__(self, folder: Path, name: str, *more: str):
        super().__init__(folder, name)
        self.more = [*SETTINGS, *more]

    def start(self, *more: str) -> Command:
        """Start the command again."""
        return super().start(*self.more, *more)


def test_turns_change_nothing(tmp_path: Path) -> None:
    side_by_side = ShortRun(tmp_path, "side")
    in_turns = ShortRun(tmp_path, "turns", *COLOCATED)
    stopped = ShortRun(tmp_path, "stopped", *COLOCATED)
    try:
        for run in (side_by_side, in_turns):
            run.start()
            run.finish()
        log = (in_turns.folder / "logs" / "engine_0.log").read_text()
        for tags in ("['weights']", "['kv_cache']"):
            assert log.count(f"seconds to wake up tags {tags}.") == STEPS + 1
        assert log.count("sleep mode is not supported on CPU") > 0
        assert all("time/handover" in row for row in in_turns.rows()[1:])
        assert_same(in_turns, side_by_side, STEPS)
        stopped.start()
        stopped.wait_in_step(2)
        stopped.warn(signal.SIGUSR1, everyone=False)
        stopped.start()
        stopped.finish()
        assert_same(stopped, side_by_side, STEPS)
    finally:
        for run in (side_by_side, in_turns, stopped):
            if run.now is not None and run.now.process.poll() is None:
                process_groups.send(run.now.sessions if run.now.processes() else [], signal.SIGKILL)
                run.now.process.wait()
    assert json.loads((stopped.folder / "summary.json").read_text())["steps"] == STEPS

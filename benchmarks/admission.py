"""Admission of groups with ``rollout.ahead``: as early as the bound allows, against as late as needed.

The producer is the real one. Engines and trainer are a simulation in virtual time: the engines work on a
number of groups at once, the rest queue; the length of a group is log-normal. So the figures are the same on
every machine. They show the policy of admission, not the speed of engines.

``python -m benchmarks.admission [STEPS]`` prints a table: the mean age of tokens in updates, steps per second
relative to early admission, and the share of the time that the trainer waited.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.rollout.groups import GroupScores, GroupTask
from rpg_megatron.rollout.producer import RolloutProducer

GROUPS = 32
"""Groups of a batch."""
SLOTS = 40
"""Groups that the engines work on at once."""
SECONDS = 10.0
"""Mean duration of a group."""
BATCH = GROUPS / SLOTS * SECONDS
"""Seconds that the engines need for a batch if they are always full."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event."""

    _now = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def _run_once(self) -> None:
        due = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        if due and not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, min(due))
        super()._run_once()  # type: ignore[misc]


class Engines:
    """Stands for dispatcher and engines. A weight update does not stop a group."""

    def __init__(self, seed: int, slowed: Callable[[int], float]):
        """slowed: ticket -> factor of the group's duration."""
        self._rng, self._slowed = random.Random(seed), slowed
        self._queue: deque[tuple[GroupTask, asyncio.Future[GroupScores]]] = deque()
        self._free = SLOTS
        self.updates = [0.0]
        """When the engines got each version."""

    def submit(self, task: GroupTask, on_generated: Callable[[], None]) -> asyncio.Future[GroupScores]:
        """As ``Dispatcher.submit``."""
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: on_generated())
        self._queue.append((task, future))
        self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            task, future = self._queue.popleft()
            asyncio.get_running_loop().create_task(self._work(task, future))

    async def _work(self, task: GroupTask, future: asyncio.Future[GroupScores]) -> None:
        loop, sigma = asyncio.get_running_loop(), 0.35
        start = loop.time()
        duration = SECONDS * self._rng.lognormvariate(-sigma * sigma / 2, sigma) * self._slowed(task.ticket)
        await asyncio.sleep(duration)
        bounds = [*self.updates, loop.time()]
        spans = np.diff(np.clip(bounds, start, loop.time()))
        versions = {v: round(1000 * span) for v, span in enumerate(spans.tolist()) if span > 0}
        future.set_result(GroupScores([1], [0.0], [False], [False], {}, versions=versions, segments=1))
        self._free += 1
        self._start()


class Stream:
    """Stands for the prompts."""

    def __init__(self) -> None:
        self.ticket = 0

    def take(self, version: int) -> tuple[GroupTask, dict[str, Any]]:
        """As ``TaskStream.take``."""
        self.ticket += 1
        prompt = np.zeros(1, np.int32)
        return GroupTask(self.ticket - 1, 0, prompt, "", 1, 0, 1, version), {}


@dataclass
class Result:
    """Of one run, without its first steps."""

    lag: float
    """Mean age of a token, in updates."""
    seconds: float
    """Mean duration of a step."""
    waited: float
    """Share of the time that the trainer waited."""


def simulate(
    ahead: int,
    work: float,
    *,
    late: bool,
    steps: int = 200,
    seed: int = 0,
    slowed: Callable[[int], float] = lambda ticket: 1.0,
) -> Result:
    """Train for ``steps`` steps. work: seconds that the trainer works on a batch, within 10%."""

    async def run() -> Result:
        engines, loop, rng = Engines(seed, slowed), asyncio.get_running_loop(), random.Random(seed)
        rollout = RolloutSettings(prompts_per_step=GROUPS, samples_per_prompt=1, ahead=ahead)
        settings: Any = SimpleNamespace(rollout=rollout, training=SimpleNamespace(steps=steps))
        dispatcher: Any = engines
        stream: Any = Stream()
        producer = RolloutProducer(settings, dispatcher, stream)
        if not late:
            producer._admission = None
        producer.admit(0)
        lags, waits, skip = [], [], steps // 10
        for step in range(1, steps + 1):
            asked = loop.time()
            if step == skip:
                began = asked
            batch = await producer.next_batch(step, step - 1)
            waits.append(loop.time() - asked)
            lags.append(batch.metrics["async/lag_mean"])
            await asyncio.sleep(work * rng.uniform(0.9, 1.1))
            engines.updates.append(loop.time())
            producer.admit(step)
        seconds = (loop.time() - began) / (steps - skip + 1)
        return Result(float(np.mean(lags[skip:])), seconds, float(np.mean(waits[skip:])) / seconds)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


SIDES = {"engines slower": 0.6, "balanced": 1.25, "trainer slower": 3.0}
"""The trainer's work on a batch, as a multiple of ``BATCH``. A batch takes the engines longer than that: its
last groups do not fill them.
"""
STRAGGLER = {"trainer slower, one group in 1,000 takes 10 times as long": 3.0}


def main() -> None:
    """Print the table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(f"{'':58} ahead   lag early   late   steps/s   waits early   late")
    for side, work in {**SIDES, **STRAGGLER}.items():
        for ahead in (1, 2, 4):
            slowed = (lambda t: 10.0 if t % 1000 == 500 else 1.0) if side in STRAGGLER else lambda t: 1.0
            early, late = (
                simulate(ahead, work * BATCH, late=way, steps=steps, slowed=slowed) for way in (False, True)
            )
            print(
                f"{side:58} {ahead:5} {early.lag:11.2f} {late.lag:6.2f} {early.seconds / late.seconds:9.3f} "
                f"{early.waited:13.1%} {late.waited:6.1%}"
            )


if __name__ == "__main__":
    main()

"""When groups are admitted with ``rollout.ahead``: a simulation in virtual time, with the real producer."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.setup import Table, benchmark, main
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
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        if times and not self._ready:
            self._now = max(self._now, min(times))
        super()._run_once()


class Engines:
    """Replaces dispatcher and engines. A weight update does not stop a group."""

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
            asyncio.get_running_loop().create_task(self._work(*self._queue.popleft()))

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
    """Replaces the prompt stream."""

    def __init__(self) -> None:
        self.ticket = 0

    def take(self, version: int) -> tuple[GroupTask, dict[str, Any]]:
        """As ``TaskStream.take``."""
        self.ticket += 1
        return GroupTask(self.ticket - 1, 0, np.zeros(1, np.int32), "", 1, 0, 1, version), {}


@dataclass
class Result:
    """One simulated run, without its first steps."""

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
    """Train for ``steps`` steps. work: seconds that the trainer works on a batch, up to 10% more or less."""

    async def run() -> Result:
        engines, loop, rng = Engines(seed, slowed), asyncio.get_running_loop(), random.Random(seed)
        rollout = RolloutSettings(prompts_per_step=GROUPS, samples_per_prompt=1, ahead=ahead)
        settings = SimpleNamespace(rollout=rollout, training=SimpleNamespace(steps=steps))
        producer = RolloutProducer(settings, engines, Stream())
        if not late:
            producer._admission = None
        producer.admit(0)
        lags, waits, skip = [], [], steps // 10
        for step in range(1, steps + 1):
            request = loop.time()
            if step == skip:
                start = request
            batch = await producer.next_batch(step, step - 1)
            waits.append(loop.time() - request)
            lags.append(batch.metrics["async/lag_mean"])
            await asyncio.sleep(work * rng.uniform(0.9, 1.1))
            engines.updates.append(loop.time())
            producer.admit(step)
        seconds = (loop.time() - start) / (steps - skip + 1)
        return Result(float(np.mean(lags[skip:])), seconds, float(np.mean(waits[skip:])) / seconds)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@benchmark(steps=20)
def admission(steps: int = 200) -> None:
    """Groups admitted as early as the bound allows, against as late as needed.

    Simulated engines work on 40 groups at once, the rest queue; the duration of a group is log-normal. So the
    figures are the same on every machine, and say nothing about the speed of engines. The trainer's work on a
    batch is a multiple of the engines' time for a batch at full load; a batch takes longer than that, since
    its last groups do not fill the engines.
    """
    columns = ("trainer's work", "ahead", "lag, early|.2f", "lag, late|.2f", "steps/s, late / early|.3f")
    table = Table(*columns, "trainer waits, early|.1%", "late|.1%")
    for work, straggler in ((0.6, 1.0), (1.25, 1.0), (3.0, 1.0), (3.0, 10.0)):
        name = str(work) + (", one group in 1,000 takes 10 times as long" if straggler > 1 else "")

        def slowed(ticket: int, straggler: float = straggler) -> float:
            return straggler if ticket % 1000 == 500 else 1.0

        for ahead in (1, 2, 4):
            ways = (False, True)
            early, late = (simulate(ahead, work * BATCH, late=w, steps=steps, slowed=slowed) for w in ways)
            ratio = early.seconds / late.seconds
            table.row(name, ahead, early.lag, late.lag, ratio, early.waited, late.waited)


if __name__ == "__main__":
    main(__doc__, admission)

"""Sampling ahead of the trainer (``rollout.ahead``): its speed, and when groups are admitted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from benchmarks.setup import Report, TrainRun, benchmark, main, python_path, train
from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.rollout.groups import GroupScores, GroupTask
from rpg_megatron.rollout.producer import RolloutProducer

# -- speed, with real engines --------------------------------------------------------------------------------

CASES: dict[str, tuple[str, list[str]]] = {
    "0": ("synchronous", []),
    "ranks": ("synchronous, 2 ranks", ["parallel.data=2"]),
    "1": ("1 ahead", ["rollout.ahead=1"]),
    "drain": ("1 ahead, drain", ["rollout.ahead=1", "rollout.inflight=drain"]),
    "2": ("2 ahead", ["rollout.ahead=2"]),
    "4": ("4 ahead", ["rollout.ahead=4"]),
    "1-early": ("1 ahead, admitted early", ["rollout.ahead=1"]),
    "2-early": ("2 ahead, admitted early", ["rollout.ahead=2"]),
    "4-early": ("4 ahead, admitted early", ["rollout.ahead=4"]),
}
_EARLY = """
import sys
if "rpg_megatron.rollout.sampler" in sys.orig_argv:
    from rpg_megatron.rollout.admission import Admission
    Admission.due = lambda self, now: 1 << 30
"""
"""sitecustomize.py of a run whose groups are admitted as soon as the bound allows."""


@benchmark(cases=("0", "1"), repetitions=1, steps=4, edge=1, prompts=4, mean=8.0, limit=32, minibatches=1)
def speed(
    report: Report,
    cases: tuple[Literal["0", "ranks", "1", "drain", "2", "4", "1-early", "2-early", "4-early"], ...] = (
        "0",
        "ranks",
        "1",
        "2",
        "4",
    ),
    repetitions: int = 3,
    steps: int = 20,
    edge: int = 5,
    prompts: int = 32,
    mean: float = 64.0,
    sigma: float = 1.0,
    limit: int = 384,
    slots: int = 64,
    minibatches: int = 8,
    settings: tuple[str, ...] = (),
) -> None:
    """Steps a second with sampling ahead, against synchronous runs, on two cores of this machine.

    Each case is a run with the quickstart's model and prompts. ``0`` and ``ranks`` are synchronous, with one
    or two trainer ranks; engine and trainer use both cores in turn. In the others each has a core: ``1``,
    ``2``, ``4`` so many steps ahead, ``drain`` with ``rollout.inflight: drain``, and ``1-early``,
    ``2-early``, ``4-early`` without late admission. A repetition of all takes about a quarter of an hour; the
    machine should do nothing else. Cases alternate, so that a ratio compares runs made soon after each
    other; medians of these, and (lowest to highest).

    Lengths of responses are log-normal and determined by their seeds: ``mean``, ``sigma`` and ``limit``, 8 to
    a prompt, ``slots`` at once. The first and last ``edge`` steps, in which the stream fills and ends, are
    left out. Trainer idle: it collects a batch. Engine idle: share of the engine's polls, one every two
    seconds, with no request.
    """
    if steps - 2 * edge < 2:
        raise SystemExit("--steps must be above twice --edge plus 1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    results: dict[str, list[tuple[TrainRun, float, float]]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            episode = f"{{type: benchmarks.episodes:response_of_length, mean: {mean}, sigma: {sigma}}}"
            overrides = ["parallel={tensor: 1}", "evaluation=null", "checkpoint.every=null"]
            overrides += ["export.enabled=false", "correction.type=truncate"]
            overrides += [f"training.steps={steps}", f"rollout.prompts_per_step={prompts}"]
            overrides += [f"training.minibatches={minibatches}", f"rollout.max_response_tokens={limit}"]
            overrides += [
                f"engine.max_sequences={slots}",
                f"rollout.episode={episode}",
                *CASES[case][1],
                *settings,
            ]
            with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
                environment = {}
                if case.endswith("-early"):
                    (Path(place) / "sitecustomize.py").write_text(_EARLY)
                    environment = python_path(Path(place))
                run = train(Path(place), *overrides, environment=environment)
                first, last = len(run.ends) - steps + edge - 1, len(run.ends) - edge - 1
                idle = _engine_idle(run.folder, run.ends[first], run.ends[last])
            rate = (last - first) / (run.ends[last] - run.ends[first])
            run.rows = run.rows[first + 1 : last + 1]
            results[case].append((run, rate, idle))
            report.say(f"{CASES[case][0]}: {rate:.3f} steps/s")
    title = (
        f"{prompts} x 8 responses, {slots} at once; {minibatches} updates a step; {repetitions} repetitions"
    )
    columns = (
        "case",
        "steps/s|.3f",
        f"x {CASES[cases[0]][0]}",
        "trainer idle|.0%",
        "engine idle|.0%",
        "lag|.2f",
    )
    table = report.table(*columns, title=title)
    baseline = [rate for _, rate, _ in results[cases[0]]]
    for name, runs in results.items():
        rates = [rate for _, rate, _ in runs]
        ratios = [rate / base for rate, base in zip(rates, baseline, strict=True)]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        trainer = statistics.median(run.mean("time/collect") / run.mean("time/step") for run, *_ in runs)
        engine = statistics.median(idle for *_, idle in runs)
        lag = statistics.median(run.mean("async/lag_mean") for run, *_ in runs)
        ratio = f"{statistics.median(ratios):.2f}{spread}"
        table.row(CASES[name][0], statistics.median(rates), ratio, trainer, engine, lag)


def _engine_idle(folder: Path, begin: float, end: float) -> float:
    """Share of the polls in a time span with no request running in the engine."""
    rows = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    polls = [row["running"][0] for row in rows if "running" in row and begin <= row["time"] <= end]
    return sum(running == 0 for running in polls) / len(polls) if polls else float("nan")


# -- admission, in virtual time ------------------------------------------------------------------------------

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
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        if times and not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, min(times))
        super()._run_once()  # type: ignore[misc]


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
        settings: Any = SimpleNamespace(rollout=rollout, training=SimpleNamespace(steps=steps))
        dispatcher: Any = engines
        stream: Any = Stream()
        producer = RolloutProducer(settings, dispatcher, stream)
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
def admission(report: Report, steps: int = 200) -> None:
    """Groups admitted as early as the bound allows, against as late as needed; a simulation in virtual time.

    The producer is the real one. Simulated engines work on 40 groups at once, the rest queue; the duration of
    a group is log-normal. So the figures are the same on every machine, and say nothing about the speed of
    engines. The trainer's work on a batch is a multiple of the engines' time for a batch at full load; a
    batch takes longer than that, since its last groups do not fill the engines.
    """
    columns = ("trainer's work", "ahead", "lag, early|.2f", "lag, late|.2f", "steps/s, late / early|.3f")
    table = report.table(*columns, "trainer waits, early|.1%", "late|.1%")
    for work, straggler in ((0.6, 1.0), (1.25, 1.0), (3.0, 1.0), (3.0, 10.0)):
        name = str(work) + (", one group in 1,000 takes 10 times as long" if straggler > 1 else "")

        def slowed(ticket: int, straggler: float = straggler) -> float:
            return straggler if ticket % 1000 == 500 else 1.0

        for ahead in (1, 2, 4):
            early, late = (
                simulate(ahead, work * BATCH, late=way, steps=steps, slowed=slowed) for way in (False, True)
            )
            ratio = early.seconds / late.seconds
            table.row(name, ahead, early.lag, late.lag, ratio, early.waited, late.waited)


if __name__ == "__main__":
    main(__doc__, speed, admission)

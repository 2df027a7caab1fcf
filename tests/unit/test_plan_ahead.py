"""The step that ``plan`` computes with ``rollout.ahead`` is that of the real producer.

Why: which of trainer, engines and the longest response sets the pace changes with the number of batches in
flight, and a formula that counts one of them is several times off. The producer and its admission are real,
on a clock that jumps to the next event; the engines stand in for vLLM's: they have a number of slots, and
each token takes the same time. Not covered: the speed of real engines, which changes with their batch.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.ahead import Stream, VirtualLoop
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.commands.plan.step_time import StepTime, estimate_step
from rpg_megatron.config import load_settings
from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.rollout.groups import GroupScores, GroupTask
from rpg_megatron.rollout.producer import RolloutProducer

QWEN3_8B = Path(__file__).parents[2] / "examples" / "qwen3_8b_dapo_math_8k.yaml"
PROMPTS, SAMPLES, LIMIT, TOKEN = 16, 8, 8192, 0.01
"""Of a batch: prompts, responses of each, most tokens; and seconds of a token."""
MEAN, P90 = 0.4, 0.7
"""Of the limit."""


class Engines:
    """Replaces dispatcher and engines: slots for so many responses at once, a queue for the others."""

    def __init__(self, slots: int, length: Callable[[], float]) -> None:
        self._free, self._length = slots, length
        self._queue: deque[list[Any]] = deque()

    def submit(self, task: GroupTask, on_generated: Callable[[], None]) -> asyncio.Future[GroupScores]:
        """As ``Dispatcher.submit``."""
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: on_generated())
        group = [SAMPLES, future]
        self._queue.extend([group] * SAMPLES)
        self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            seconds = self._length() * TOKEN
            asyncio.get_running_loop().call_later(seconds, self._end, self._queue.popleft())

    def _end(self, group: list[Any]) -> None:
        self._free += 1
        group[0] -= 1
        if not group[0]:
            group[1].set_result(GroupScores([1], [0.0], [False], [False], {}, versions={0: 1}, segments=1))
        self._start()


def seconds_of_a_step(ahead: int, work: float, slots: int, steps: int = 25) -> float:
    """Mean time of the producer's steps, but the first third. work: seconds of the trainer for a batch."""
    rng = random.Random(0)
    sigma = 1.2816 - math.sqrt(1.2816**2 - 2 * math.log(P90 / MEAN))
    mu = math.log(MEAN * LIMIT) - sigma**2 / 2

    async def run() -> float:
        loop = asyncio.get_running_loop()
        rollout = RolloutSettings(prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, ahead=ahead)
        settings: Any = SimpleNamespace(rollout=rollout, training=SimpleNamespace(steps=10**6))
        engines: Any = Engines(slots, lambda: min(LIMIT, rng.lognormvariate(mu, sigma)))
        stream: Any = Stream()
        producer = RolloutProducer(settings, engines, stream)
        producer.admit(0)
        times = []
        for step in range(1, steps + 1):
            times.append(loop.time())
            await producer.next_batch(step, step - 1)
            await asyncio.sleep(work)
            producer.admit(step)
        return float(np.mean(np.diff(times)[steps // 3 :]))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def planned(ahead: int, work: float, slots: int) -> StepTime:
    """The step of a plan whose engines are those, and whose trainer takes as long."""
    overrides = [
        f"rollout={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, ahead: {ahead}}}",
        f"rollout.max_response_tokens={LIMIT}",
        "correction.type=truncate",
        "training.minibatches=1",
        "parallel={tensor: 1, data: 4}",
        f"engine={{replicas: 4, max_sequences: {slots // 4}}}",
        "bridge.transport=process_group",
    ]
    plan = make_plan(load_settings(QWEN3_8B, overrides), "h200-141")
    lengths = f"response_mean={MEAN}", f"response_p90={P90}", "prompt_mean=1e-9"
    speeds = "memory_bandwidth=1e30", "peak_bf16=1e30", f"decode_overhead={TOKEN}", "step_overhead=0"
    step = estimate_step(plan, replace(assume("h200-141", [*lengths, *speeds, "network=1e30"]), factors={}))
    trained = "log-probs", "update", "sync", "other"
    phases = [
        p if p.name not in trained else replace(p, seconds=work * (p.name == "update")) for p in step.phases
    ]
    return replace(step, phases=tuple(phases))


@pytest.mark.parametrize("ahead", [1, 4, 8])
@pytest.mark.parametrize("slots", [32, 128, 512])
def test_a_planned_step_is_the_producers(ahead: int, slots: int) -> None:
    """Engines the slower side, both equal, the trainer the slower side; slots for a quarter to four."""
    engines = PROMPTS * SAMPLES / min(slots, PROMPTS * SAMPLES) * MEAN * LIMIT * TOKEN
    for share in (0.3, 1.0, 3.0):
        measured = seconds_of_a_step(ahead, share * engines, slots)
        assert planned(ahead, share * engines, slots).step == pytest.approx(measured, rel=0.2), share

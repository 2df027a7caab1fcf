"""What ``benchmarks.async_rollouts`` changes inside the processes of a run; the product is not edited.

The benchmark puts a ``sitecustomize`` module on PYTHONPATH that calls ``start`` in every Python process, and
a vLLM plug-in that calls ``record_steps``. RPG_BENCH holds a ``Hooks`` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "RPG_BENCH"


@dataclass(frozen=True)
class Hooks:
    """What is changed in a run."""

    mean: float
    """Mean of the responses' log-normal lengths, before they are cut at the token limit."""
    sigma: float
    """Standard deviation of the logarithm of a length."""
    steps: str
    """Folder for the engine's steps."""
    engine_core: int | None = None
    """The core that the engine gets; None: all of the run's."""
    trainer_core: int | None = None
    """The core of the trainer ranks, each with one thread."""

    def length_of(self, seed: int) -> int:
        """The length of the response with this sampling seed, tokens."""
        drawn = random.Random(seed).lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, round(drawn))


def start() -> None:
    """In each process: what its command line calls for. A failure ends the process."""
    if VARIABLE not in os.environ:
        return
    try:
        hooks = Hooks(**json.loads(os.environ[VARIABLE]))
        command = set(sys.orig_argv)
        if "vllm.entrypoints.openai.api_server" in command and hooks.engine_core is not None:
            os.sched_setaffinity(0, {hooks.engine_core})
        if "rpg_megatron.training.rank" in command and hooks.trainer_core is not None:
            os.sched_setaffinity(0, {hooks.trainer_core})
            os.environ["OMP_NUM_THREADS"] = "1"
        if command & {"rpg_megatron.rollout.sampler", "rpg_megatron.rollout.worker"}:
            force_lengths(hooks)
    except BaseException:  # Python itself would only report it, and continue
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def force_lengths(hooks: Hooks) -> None:
    """In the sampler: every response ends at a length that follows from its seed, at most its token limit.

    A response that continues with new weights comes back as a request for its prompt and its tokens so far,
    with another seed: what is left of it is remembered by these tokens. Of equal ones, which can only be
    responses of one group, either gets the length of the other.
    """
    import msgspec
    import numpy as np

    from rpg_megatron.bridge.vllm.generate_route import GENERATE, SampledBytes
    from rpg_megatron.engine.client import EngineClient

    plain = EngineClient._ask
    decoder = msgspec.msgpack.Decoder(list[SampledBytes])
    left: dict[bytes, list[int]] = {}

    async def ask(self: EngineClient, method: str, path: str, body: Any, timeout: float) -> bytes:
        if path != GENERATE:
            return await plain(self, method, path, body, timeout)
        params = body["sampling_params"]
        key = np.array(body["token_ids"], np.int32).tobytes()

        async def one(index: int) -> SampledBytes:
            seed = params["seed"] + index
            wanted = left[key].pop() if left.get(key) else hooks.length_of(seed)
            own = {"n": 1, "seed": seed, "max_tokens": min(wanted, params["max_tokens"])}
            own |= {"ignore_eos": True, "stop_token_ids": []}
            answer = await plain(self, method, path, body | {"sampling_params": params | own}, timeout)
            [sampled] = decoder.decode(answer)
            if (rest := own["max_tokens"] - len(sampled.tokens) // 4) > 0:
                left.setdefault(key + sampled.tokens, []).append(rest)
            sampled.index = index
            return sampled

        return msgspec.msgpack.encode(await asyncio.gather(*(one(i) for i in range(params["n"]))))

    EngineClient._ask = ask  # type: ignore[method-assign]


def record_steps() -> None:
    """In vLLM: append a line for each step of the engine to a file: start, end, tokens decoded, prefilled.

    Times are ``time.monotonic()``. A step that was scheduled before the previous one had ended begins there.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    folder = Path(json.loads(os.environ[VARIABLE])["steps"])
    schedule, update = Scheduler.schedule, Scheduler.update_from_output
    began: deque[float] = deque()
    last, file = 0.0, None

    def timed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        output = schedule(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            began.append(now)
        return output

    def timed_update(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last, file
        result = update(self, output, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            file = file or (folder / f"{os.getpid()}.txt").open("w", buffering=1, encoding="utf-8")
            start, last = max(began.popleft(), last), time.monotonic()
            counts = output.num_scheduled_tokens.values()
            decoded = sum(n == 1 for n in counts)
            file.write(f"{start:.6f} {last:.6f} {decoded} {sum(counts) - decoded}\n")
        return result

    Scheduler.schedule, Scheduler.update_from_output = timed_schedule, timed_update

"""Generate groups of responses on whichever engine is free; engine failures neither lose nor repeat one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.config.files import read_json
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.client import EngineGone, Sample
from rpg_megatron.rollout.engine_pool import EnginePool, Replica, first_error

_OVERSUBSCRIPTION = 1.25
"""Sequences sent to an engine, relative to those it decodes at once, so that it never waits for a prompt."""


@dataclass
class GenerationRequest:
    """A group of responses to one prompt, to be generated."""

    prompt: Prompt
    samples: int
    """Number of responses."""
    seed: int
    """Response i is sampled with seed + i."""
    max_tokens: int
    """Token limit of a response."""
    done: list[Sample] = field(default_factory=list)
    """The responses so far. Any engine may generate the next: it is determined by the seed."""


async def generate_all(
    pool: EnginePool,
    requests: Sequence[GenerationRequest],
    on_complete: Callable[[int], None],
    *,
    max_sequences: int,
    **sampling: Any,
) -> None:
    """Complete all requests; ``on_complete(index)`` is called for each as it is complete.

    What a failed engine leaves unfinished goes to the other engines, or waits for its restart.
    max_sequences: sequences that an engine decodes at once. sampling: see ``EngineClient.generate``.
    """
    if not requests:
        return
    queue: asyncio.Queue[int] = asyncio.Queue()
    for index in range(len(requests)):
        queue.put_nowait(index)
    left = len(requests)
    finished = asyncio.Event()

    async def work(replica: Replica) -> None:
        nonlocal left
        while True:
            await replica.serving.wait()
            index = await queue.get()
            if not await _complete(pool, replica, requests[index], max_sequences, sampling):
                queue.put_nowait(index)
                continue
            on_complete(index)
            left -= 1
            if not left:
                finished.set()

    sequences = min(max(request.samples for request in requests), max_sequences)
    count = max(1, -(-int(_OVERSUBSCRIPTION * max_sequences) // sequences))
    try:
        async with asyncio.TaskGroup() as group:
            # Workers of the engines alternate, so that a step of few prompts is spread over all engines.
            workers = [group.create_task(work(r)) for _ in range(count) for r in pool.replicas]
            await finished.wait()
            for worker in workers:  # they wait for further requests or for their engine
                worker.cancel()
    except BaseExceptionGroup as e:
        raise first_error(e) from None


async def _complete(
    pool: EnginePool,
    replica: Replica,
    request: GenerationRequest,
    max_sequences: int,
    sampling: dict[str, Any],
) -> bool:
    """Generate the missing responses of a request, at most ``max_sequences`` per call to the engine.

    Returns whether it is complete; it is not if the engine failed.
    """
    while len(request.done) < request.samples:
        if not replica.serving.is_set():
            return False
        incarnation = replica.incarnation
        try:
            samples = await replica.client.generate(
                request.prompt.tokens,
                n=min(max_sequences, request.samples - len(request.done)),
                max_tokens=request.max_tokens,
                seed=request.seed + len(request.done),
                **sampling,
            )
        except EngineGone as e:
            pool.mark_failed(replica, incarnation, str(e))
            pool.resent += 1
            return False
        if not pool.check(replica, incarnation):  # a restarted engine may have answered, without weights
            pool.resent += 1
            return False
        request.done += samples
    return True


def seed_of(seed: int, purpose: str, step: int, index: int, prompt_id: int) -> int:
    """Seed of a group's first response: a 62-bit hash, so that the seeds of two groups do not overlap."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def stop_tokens(model: Path, tokenizer: Any) -> list[int]:
    """Token ids that end a response: the tokenizer's end-of-sequence token, and those of the checkpoint's
    generation_config.json (config.json if there is none). Raises UserError if there is none at all.
    """
    found = {tokenizer.eos_token_id}
    listed = None
    for name in ("generation_config.json", "config.json"):
        try:
            listed = read_json(model / name).get("eos_token_id")
            break
        except (OSError, ValueError, AttributeError):
            continue
    found |= set(listed) if isinstance(listed, list) else {listed}
    stops = sorted(t for t in found if isinstance(t, int))
    if not stops:
        raise UserError(
            f"model.path: neither the tokenizer nor generation_config.json in {model} names an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return stops

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

_TOKENS_PER_CALL = 4096
"""A call to an engine is for as many responses as this covers at their token limit, at least one."""


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
    found: dict[int, Sample] = field(default_factory=dict)
    """The responses so far, by number. Any engine may generate the others: the seed determines them."""

    @property
    def responses(self) -> list[Sample]:
        """All responses of a complete request, in order."""
        return [self.found[number] for number in range(self.samples)]

    def missing(self, most: int) -> list[range]:
        """Numbers of the responses that are not there, in runs of at most ``most``."""
        runs: list[range] = []
        for number in range(self.samples):
            if number in self.found:
                continue
            if runs and runs[-1].stop == number and len(runs[-1]) < most:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        return runs


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
    """Generate the missing responses of a request, all on one engine, which computes the prompt once.

    Few responses share a call, so that answers arrive over time. Returns whether the request is complete; it
    is not if the engine failed.
    """
    incarnation = replica.incarnation

    async def ask(numbers: range) -> None:
        try:
            samples = await replica.client.generate(
                request.prompt.tokens,
                n=len(numbers),
                max_tokens=request.max_tokens,
                seed=request.seed + numbers.start,
                **sampling,
            )
        except EngineGone as e:
            pool.mark_failed(replica, incarnation, str(e))
            pool.resent += 1
            return
        if pool.check(replica, incarnation):
            request.found |= dict(zip(numbers, samples, strict=True))
        else:  # a restarted engine may have answered, without weights
            pool.resent += 1

    if not replica.serving.is_set():
        return False
    most = min(max_sequences, max(1, _TOKENS_PER_CALL // request.max_tokens))
    try:
        async with asyncio.TaskGroup() as group:
            for numbers in request.missing(most):
                group.create_task(ask(numbers))
    except BaseExceptionGroup as e:
        raise first_error(e) from None
    return len(request.found) == request.samples


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

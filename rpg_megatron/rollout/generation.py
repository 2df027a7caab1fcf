"""Groups of responses, sampled on whichever engine is free; none is lost or doubled when an engine is."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.client import EngineGone, Sample
from rpg_megatron.rollout.engine_pool import EnginePool, Replica, first_error

_AHEAD = 1.25
"""Sequences sent to an engine, over those it decodes at once: enough that it never waits for the next prompt.
"""


@dataclass
class GenerationRequest:
    """A group of responses to be sampled."""

    prompt: Prompt
    samples: int
    seed: int
    """Response i is drawn with seed + i."""
    max_tokens: int
    """Longest response."""
    done: list[Sample] = field(default_factory=list)
    """The responses so far. Any engine may add the next: the seed says what they are."""


async def sample_draws(
    fleet: EnginePool,
    draws: Sequence[GenerationRequest],
    finish: Callable[[int], None],
    *,
    most: int,
    **sampling: Any,
) -> None:
    """Fill up all draws; ``finish(place)`` is called for each as it is done.

    What a lost engine leaves unfinished goes to the others, or waits until it is back.
    most: sequences that an engine decodes at once. sampling: see ``EngineClient.generate``.
    """
    if not draws:
        return
    waiting: asyncio.Queue[int] = asyncio.Queue()
    for place in range(len(draws)):
        waiting.put_nowait(place)
    left = len(draws)
    finished = asyncio.Event()

    async def work(replica: Replica) -> None:
        nonlocal left
        while True:
            await replica.serving.wait()
            place = await waiting.get()
            if not await _fill(fleet, replica, draws[place], most, sampling):
                waiting.put_nowait(place)
                continue
            finish(place)
            left -= 1
            if not left:
                finished.set()

    sequences = min(max(draw.samples for draw in draws), most)
    count = max(1, -(-int(_AHEAD * most) // sequences))
    try:
        async with asyncio.TaskGroup() as group:
            # Slots of the engines alternate, so that a step of few prompts is spread over all of them.
            slots = [group.create_task(work(r)) for _ in range(count) for r in fleet.replicas]
            await finished.wait()
            for slot in slots:  # they wait for more, or for their engine
                slot.cancel()
    except BaseExceptionGroup as e:
        raise first_error(e) from None


async def _fill(
    fleet: EnginePool, replica: Replica, draw: GenerationRequest, most: int, sampling: dict[str, Any]
) -> bool:
    """Complete one group, in several requests if it is larger than what the engine takes in one.

    Returns whether it is complete: not if the engine was lost.
    """
    while len(draw.done) < draw.samples:
        if not replica.serving.is_set():
            return False
        incarnation = replica.incarnation
        try:
            samples = await replica.client.generate(
                draw.prompt.tokens,
                n=min(most, draw.samples - len(draw.done)),
                max_tokens=draw.max_tokens,
                seed=draw.seed + len(draw.done),
                **sampling,
            )
        except EngineGone as e:
            fleet.mark_failed(replica, incarnation, str(e))
            fleet.resent += 1
            return False
        if not fleet.check(replica, incarnation):  # what answered may have been the next life
            fleet.resent += 1
            return False
        draw.done += samples
    return True


def seed_of(seed: int, purpose: str, step: int, place: int, prompt_id: int) -> int:
    """Seed of a group's first response: 62 bits, far apart for any two groups."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{place}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def stop_tokens(model: Path, tokenizer: Any) -> list[int]:
    """Token ids that end a response.

    They are the tokenizer's and those of the checkpoint's generation_config.json, or of config.json without
    one.
    """
    found = {tokenizer.eos_token_id}
    listed = None
    for name in ("generation_config.json", "config.json"):
        try:
            listed = json.loads((model / name).read_text(encoding="utf-8")).get("eos_token_id")
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

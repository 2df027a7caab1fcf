"""Seeds of the responses, and the tokens that end them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import read_json


def seed_of(seed: int, purpose: str, step: int, index: int, prompt_id: int) -> int:
    """Seed of a group's first response: a 62-bit hash, so that seeds of different groups do not overlap."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def segment_seed(seed: int, start: int) -> int:
    """Seed for continuing a response at token ``start``. seed: of the response.

    With the response's own seed, the engine would reuse the random numbers of its first tokens.
    """
    return seed if start == 0 else seed_of(seed, "segment", 0, start, 0)


def stop_tokens(model: Path, tokenizer: Any, more: Iterable[int] = (), *, chats: bool = False) -> list[int]:
    """Token ids that end a response: the tokenizer's end-of-sequence token, those of the checkpoint's
    generation_config.json (config.json if there is none), ``more``, and with ``chats`` the one that the chat
    template writes after a turn. Raises UserError if neither tokenizer nor checkpoint names one.
    """
    ids = {tokenizer.eos_token_id}
    if chats:
        from rpg_megatron.data.chat_rendering import (
            turn_end,
        )  # it imports asyncio, which commands start without

        ids.add(turn_end(tokenizer))
    listed = None
    for name in ("generation_config.json", "config.json"):
        try:
            listed = read_json(model / name).get("eos_token_id")
            break
        except (OSError, ValueError, AttributeError):
            continue
    ids |= set(listed) if isinstance(listed, list) else {listed}
    stops = sorted(t for t in ids if isinstance(t, int))
    if not stops:
        raise UserError(
            f"model.path: neither the tokenizer nor generation_config.json in {model} names an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return sorted({*stops, *more})


def chat_ends(settings: Settings, model: Path | None = None) -> list[int]:
    """Token ids that end a response of a run with chats, which its exports name; empty for other runs.

    model: folder of the tokenizer, if not the run's.
    """
    from rpg_megatron.data.prompts import quick_tokenizer  # needs numpy, which a login node may lack

    if not settings.chats:
        return []
    model = model or settings.model.path
    return stop_tokens(model, quick_tokenizer(model), settings.rollout.stop_token_ids, chats=True)

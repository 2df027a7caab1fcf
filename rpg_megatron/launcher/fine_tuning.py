"""Checks of the conversations of a fine-tuning run, and the number of its steps. Imports no torch."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.rollout.seeds import stop_tokens

if TYPE_CHECKING:  # numpy, which a login node may lack
    from rpg_megatron.data.conversations import Conversations


def check_conversations(settings: Settings, *, offline: bool = False) -> list[str]:
    """Check that all conversations can be read and tokenized; returns warnings. Raises UserError.

    offline: leave out data on the hub, and all if the model's folder has no tokenizer.
    """
    if settings.sft is None:
        return []
    warnings = []
    for key, part in settings.sft.parts:
        if offline and any(source.on_hub for source in part.sources):
            continue
        try:
            rows = _read(settings, key)
        except UserError:
            if offline and open_tokenizer(settings.model.path, chat=False) is None:
                continue
            raise
        total, left_out = len(rows), rows.left_out
        if left_out.counts:
            counts = ", ".join(f"{count:,} {why}" for why, count in left_out.counts.items())
            first = f" ({left_out.first})" if left_out.first else ""
            warnings.append(f"{key}: conversations left out or cut: {counts}{first}; {total:,} rows are used")
        if key != "sft.data":
            continue
        given, steps = settings.training, with_steps(settings).training.steps
        if "steps" in given.model_fields_set and given.steps != steps:
            no = f"training.steps ({given.steps}) has no effect: sft.epochs ({settings.sft.epochs:g})"
            warnings.append(f"{no} takes {steps} steps; set sft.epochs to null, or remove training.steps")
        warnings += settings.optimizer.warnings(steps)
        if total < settings.sft.batch_size:
            warnings.append(
                f"{key}: {total} conversations, fewer than sft.batch_size ({settings.sft.batch_size})"
            )
    return warnings


def with_steps(settings: Settings) -> Settings:
    """The settings with the ``training.steps`` that ``sft.epochs`` takes. Raises UserError."""
    if settings.sft is None or settings.sft.epochs is None:
        return settings
    total = settings.sft.total(len(_read(settings, "sft.data")))
    assert total is not None
    steps = math.ceil(total / settings.sft.batch_size)
    return settings.changed(training={"steps": steps})


def _read(settings: Settings, key: str) -> Conversations:
    part = dict(settings.sft.parts)[key] if settings.sft is not None else None
    assert part is not None
    return _read_once(part.model_dump_json(), key, settings.model.path, settings.rollout.stop_token_ids)


@lru_cache(maxsize=2)  # the checks read the data, and the number of steps needs them again
def _read_once(part: str, key: str, model: Path, more_stops: tuple[int, ...]) -> Conversations:
    from rpg_megatron.data.conversations import read_conversations
    from rpg_megatron.data.prompts import quick_tokenizer

    settings = ConversationSettings.model_validate_json(part)
    tokenizer = quick_tokenizer(model, chat=settings.chat)
    stops, end = stop_tokens(model, tokenizer, more_stops, chats=settings.chat), next(iter(more_stops), None)
    vocab = read_model_shape(model).vocab_size
    return read_conversations(settings, tokenizer, key, stops=stops, end=end, vocab=vocab)

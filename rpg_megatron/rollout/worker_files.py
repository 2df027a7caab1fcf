"""What the sampler's workers and the gateway read of the model: files in the run's work folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.prompts import load_tokenizer, save_chat_template, save_codec, without_torch
from rpg_megatron.data.vocabulary import check_stops
from rpg_megatron.rollout.gateway import CHAT
from rpg_megatron.rollout.seeds import stop_tokens

CODEC = "codec.json"
"""File with the tokenizer of the workers."""


def prepare_workers(settings: Settings, work: Path) -> tuple[Any, list[int]]:
    """Load the tokenizer, and write what workers and the gateway read of it into ``work``.

    Returns the tokenizer, and the tokens that end a response. Raises UserError if the model has none of them.
    """
    with without_torch():
        tokenizer = load_tokenizer(settings.model.path)
    stops = stop_tokens(settings.model.path, tokenizer, settings.rollout.stop_token_ids, chats=settings.chats)
    check_stops(stops, read_model_shape(settings.model.path).vocab_size)
    save_codec(tokenizer, work / CODEC)
    if settings.data is not None:
        save_chat_template(tokenizer, settings.data, work / CHAT)
    return tokenizer, stops

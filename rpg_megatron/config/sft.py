"""Settings of supervised fine-tuning: conversations, batches, epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rpg_megatron.config.base import Affects, InputPath, Section
from rpg_megatron.config.data import DataSettings


class ConversationSettings(DataSettings):
    """Conversations to train on: chats, prompts with responses, or the rollouts of a run.

    ``prompt_key`` is a chat that ends with the assistant, or a prompt whose response is in ``answer_key``,
    word for word. null: the columns messages, or prompt and completion, or prompt and response, whichever
    the rows have.
    """

    rollouts: InputPath | None = None
    """The folder of a run of this project: train on its saved responses, as token ids (rejection sampling).
    The tokenizer must be the same."""
    min_reward: float | None = Field(None, allow_inf_nan=False)
    """rollouts: only responses with at least this reward; null: only those that the grader accepted."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant to train on. all: each, but for messages with ``weight: 0`` (OpenAI's format);
    last: the last one. A response in ``answer_key`` is the only one."""
    max_tokens: int = Field(8192, ge=2)
    """Maximum tokens of a conversation."""
    too_long: Literal["drop", "cut"] = "drop"
    """Conversations longer than max_tokens. drop: drop them; cut: keep their first tokens. Both are counted,
    and those that are cut before any trained token are dropped."""

    @property
    def named(self) -> bool:
        """Whether a source is given."""
        return self.rollouts is not None or super().named

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for key in ("streaming", "answer_after", "answer_boxed", "max_prompt_tokens", "preset"):
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed or any(getattr(part, key, None) for part in self.mixture):
                hint = "name the columns with prompt_key and answer_key" if key == "preset" else "remove it"
                yield f"{key} has no effect on conversations to train on; {hint}"
        if self.rollouts is None and self.min_reward is not None:
            yield "min_reward has no effect without rollouts; remove it"
        if self.rollouts is None:
            return
        kept = ("rollouts", "min_reward", "max_tokens", "too_long", "deduplicate", "shuffle", "limit")
        for key, field in type(self).model_fields.items():
            if key not in kept and getattr(self, key) != field.default:
                yield f"{key} has no effect on rollouts, whose tokens are trained as they are; remove it"


class SFTSettings(Section, affects="training"):
    """Supervised fine-tuning (``rpg-megatron sft``): each step is one update on ``batch_size`` conversations.

    The loss is the mean of -log p over all trained tokens of the step, at temperature 1.
    """

    data: Annotated[ConversationSettings, Affects("training")]
    """Conversations to train on."""
    heldout: Annotated[ConversationSettings | None, Affects("results")] = None
    """Conversations whose loss is measured; null: none."""
    every: Annotated[int, Affects("results")] = Field(10, ge=1)
    """Steps between measurements of the held-out loss; also before the first and after the last step."""
    batch_size: int = Field(64, ge=1)
    """Conversations of a step."""
    epochs: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    """Passes over the data, from which training.steps follows; null: training.steps steps."""

    @property
    def parts(self) -> list[tuple[str, ConversationSettings]]:
        """Key and settings of the data, and of the held-out data."""
        parts = [("sft.data", self.data), ("sft.heldout", self.heldout)]
        return [(key, part) for key, part in parts if part is not None]

    def total(self, rows: int) -> int | None:
        """Conversations to train on, of ``rows`` in the data; None: as many as training.steps takes."""
        return None if self.epochs is None else max(1, math.ceil(self.epochs * rows - 1e-9))

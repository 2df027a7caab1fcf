"""Settings of prompts: where they come from, what is kept, how they are put to the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rpg_megatron.config.base import InputPath, Section

Scalar = bool | int | float | str


class SourceSettings(Section):
    """Problems with checkable answers: a file, a data set of the Hugging Face hub, or a known one."""

    path: InputPath | None = None
    """A file: JSON lines (one object a line), .parquet or .arrow; or a folder that ``datasets`` saved."""
    hub: str | None = None
    """Name of a data set on the hub, such as openai/gsm8k. Without a network it must be in the cache."""
    subset: str | None = None
    """hub: the configuration, such as main."""
    split: str | None = None
    """hub: the part, such as test; null: the preset's, or train."""
    preset: str | None = None
    """A known data set: dapo-math-17k, gsm8k, math, math-500, aime24, aime25, amc23, minerva, olympiadbench.
    It says which fields hold problem and answer, in the file at ``path`` or, without one, on the hub.
    """
    prompt_key: str | None = None
    """Field that holds the problem, as text or as chat messages; a.b is b within a. null: the preset's, or
    "prompt".
    """
    answer_key: str | None = None
    """Field that holds the reference answer; null: the preset's, or "answer"."""
    answer_after: str | None = None
    """The answer is what follows the last occurrence of this mark in the field (GSM8K: "####")."""
    answer_boxed: bool = False
    """The answer is what the last \\boxed{} in the field holds (MATH's solutions)."""
    where: dict[str, Scalar | tuple[Scalar, ...]] = Field({})
    """Use only rows whose field has this value, or one of these: {level: [Level 4, Level 5]}."""
    limit: int | None = Field(None, ge=1)
    """Use only the first so many lines."""

    @model_validator(mode="after")
    def _one_place(self) -> SourceSettings:
        if self.path is not None and self.hub is not None:
            raise ValueError("path and hub exclude each other: either a file, or a data set of the hub")
        if self.path is not None and (self.subset is not None or self.split is not None):
            raise ValueError("subset and split have no effect on a file; remove them")
        if self.answer_after is not None and self.answer_boxed:
            raise ValueError("answer_after and answer_boxed exclude each other")
        return self

    @property
    def named(self) -> bool:
        """Whether it says where the problems are."""
        return self.path is not None or self.hub is not None or self.preset is not None


class MixedSourceSettings(SourceSettings):
    """One part of a mixture."""

    weight: float = Field(1.0, gt=0)
    """Its share of the prompts, relative to the others', however many problems each holds."""

    @model_validator(mode="after")
    def _somewhere(self) -> MixedSourceSettings:
        if not self.named:
            raise ValueError("each part of a mixture needs a path, a hub name or a preset")
        return self


class DataSettings(SourceSettings):
    """Problems with checkable answers, and how they are put to the model."""

    mixture: tuple[MixedSourceSettings, ...] = ()
    """Several sources instead of one; each has fields of its own."""
    deduplicate: bool = False
    """Leave out problems whose text came before."""
    malformed: Literal["stop", "skip"] = "stop"
    """What to do with a row that lacks a field, holds the wrong type or an empty one: stop and name it, or
    leave it out and count it.
    """
    template: str = "{prompt}"
    """Text sent to the model; {prompt} is replaced by the problem. In a chat, it is the user's message."""
    chat: bool = False
    """Render the prompt with the tokenizer's chat template."""
    system: str | None = None
    """chat: system prompt put before the messages; null for none."""
    thinking: bool | None = None
    """chat: the template's enable_thinking (Qwen3); null leaves it to the template."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Prompts of more tokens are too long."""
    too_long: Literal["drop", "cut"] = "drop"
    """drop: leave prompts that are too long out. cut: keep their last tokens. Either is counted."""

    @model_validator(mode="after")
    def _whole(self) -> DataSettings:
        if self.mixture and self.named:
            raise ValueError("mixture replaces path, hub and preset; put them into a part of it")
        if not self.mixture and not self.named:
            raise ValueError("names no prompts; give path (a file), hub, preset or mixture")
        if not self.chat and (self.system is not None or self.thinking is not None):
            raise ValueError("system and thinking have no effect unless chat is on")
        return self

    @property
    def sources(self) -> tuple[SourceSettings, ...]:
        """The parts of the mixture, or the one source."""
        return self.mixture or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each source."""
        return tuple(part.weight for part in self.mixture) or (1.0,)

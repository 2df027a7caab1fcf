"""Settings of prompts: source, filters, prompt template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rpg_megatron.config.base import Affects, ImportedSettings, InputPath, Section

Scalar = bool | int | float | str


class SourceSettings(Section, affects="training", evaluated=True):
    """Problems with reference answers: a file, a dataset on the Hugging Face hub, a preset, or your code."""

    path: InputPath | None = None
    """A file: JSON lines, .parquet or .arrow; a folder of such files of one kind, in the order of their
    names; or a folder written by ``datasets``' save_to_disk."""
    hub: str | None = None
    """Name of a dataset on the hub, such as openai/gsm8k. Without network access it must be in the local
    cache."""
    subset: str | None = None
    """hub: configuration name, such as main."""
    split: str | None = None
    """hub: split, such as test; null: the preset's, or train."""
    source: Annotated[ImportedSettings | None, Affects("training", evaluated=True)] = None
    """Your own code that yields the rows: {type: my_prompts:rows}, with its settings as the other keys;
    docs/extend.md. It must yield the same rows each time. If it never ends, set ``limit`` or
    ``streaming``."""
    streaming: bool = False
    """source: ask it for its rows during the run, as they are needed, and not for all of them at the start.
    Training only, in the order of the source (``shuffle`` false)."""
    preset: str | None = None
    """A known dataset: dapo-math-17k, gsm8k, math, math-500, aime24, aime25, amc23, minerva, olympiadbench.
    It sets the fields of problem and answer, for the file at ``path`` or, without one, the dataset on the
    hub."""
    prompt_key: str | None = None
    """Field that holds the problem, as text or as chat messages; a.b is b within a. null: the preset's, or
    "prompt".
    """
    answer_key: str | None = None
    """Field that holds the reference answer; null: the preset's, or "answer"."""
    answer_after: str | None = Field(None, min_length=1)
    """The answer is the text after the last occurrence of this string in the field (GSM8K: "####")."""
    answer_boxed: bool = False
    """The answer is the content of the last \\boxed{} in the field (MATH's solutions)."""
    where: dict[str, Scalar | tuple[Scalar, ...]] = Field({})
    """Keep only rows whose field has this value, or one of several: {level: [Level 4, Level 5]}."""
    limit: int | None = Field(None, ge=1)
    """Use only the first ``limit`` rows."""

    def _problems(self) -> Iterator[str]:
        places = [name for name in ("path", "hub", "source") if getattr(self, name) is not None]
        if len(places) > 1:
            yield f"{places[0]} and {places[1]} exclude each other; keep one of them"
        if not self.on_hub and (self.subset is not None or self.split is not None):
            where = "source" if self.path is None else "a file"
            yield f"subset and split have no effect on {where}; remove them"
        if self.streaming and self.source is None:
            yield "streaming is for your own code; set source, or remove streaming"
        if self.streaming and self.limit is not None:
            yield "streaming asks for as many rows as the run needs; remove limit or streaming"
        if self.streaming and self.preset is not None:
            yield "a preset is for whole data sets; with streaming, set prompt_key and answer_key"
        if self.answer_after is not None and self.answer_boxed:
            yield "answer_after and answer_boxed exclude each other; keep one of them"

    @property
    def named(self) -> bool:
        """Whether a source is given."""
        return any(part is not None for part in (self.path, self.hub, self.source, self.preset))

    @property
    def on_hub(self) -> bool:
        """Whether it is a dataset on the hub, neither a file nor code."""
        return self.path is None and self.source is None


class MixedSourceSettings(SourceSettings):
    """One source of a mixture."""

    weight: float = Field(1.0, gt=0)
    """Share of the prompts relative to the other sources, independent of their sizes."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if not self.named:
            yield "each source of a mixture needs path, hub, source or preset"
        if self.streaming:
            yield "a mixture needs the number of its rows; remove streaming, or make it the only source"


class DataSettings(SourceSettings):
    """Problems with reference answers, and the prompt made from them."""

    mixture: tuple[MixedSourceSettings, ...] = ()
    """Several sources instead of one, each with its own fields."""
    deduplicate: bool = False
    """Drop problems whose text has appeared before."""
    malformed: Literal["stop", "skip"] = "stop"
    """Rows with a missing, empty or wrongly typed field. stop: end with an error that names the row; skip:
    drop and count them."""
    shuffle: bool = True
    """Training: shuffle the prompts anew in each epoch. false: take them in the order of the rows, in a
    mixture in that of each source."""
    order_by: str | None = None
    """Training without shuffle: order the prompts by this column of numbers, small ones first, as for a
    curriculum; a.b is b within a. Rows with equal numbers stay in their order."""
    template: str = "{prompt}"
    """Prompt text; {prompt} is replaced by the problem. With chat, it is the user message."""
    chat: bool = False
    """Render the prompt with the tokenizer's chat template."""
    system: str | None = None
    """chat: system prompt; null: none."""
    thinking: bool | None = None
    """chat: the template's enable_thinking (Qwen3); null leaves it to the template."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Maximum tokens of a prompt."""
    too_long: Literal["drop", "cut"] = "drop"
    """Prompts longer than max_prompt_tokens. drop: drop them; cut: keep their last tokens. Both are
    counted."""

    @field_validator("template")
    @classmethod
    def _check_placeholder(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("has no placeholder for the problem; add {prompt}")
        return value

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.mixture and self.named:
            yield "mixture replaces path, hub, source and preset; move them into its sources"
        if not self.mixture and not self.named:
            yield "has no prompts; set path (a file), hub, preset, mixture or source (your code)"
        if self.shuffle and self.order_by is not None:
            yield "order_by has no effect while prompts are shuffled; set shuffle to false"
        if self.streaming and (self.shuffle or self.order_by is not None):
            yield "streaming keeps the order of the source; set shuffle to false, without order_by"
        if self.streaming and self.deduplicate:
            yield "deduplicate would keep all texts of an endless source; do it in the source"
        if not self.chat and (self.system is not None or self.thinking is not None):
            yield "system and thinking have no effect unless chat is on"

    @property
    def sources(self) -> tuple[SourceSettings, ...]:
        """The sources of the mixture, or the only source."""
        return self.mixture or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each source."""
        return tuple(part.weight for part in self.mixture) or (1.0,)

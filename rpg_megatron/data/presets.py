"""Data set presets (``data.preset``): Hugging Face hub name, and the fields with problem and answer.

Copies of a data set name their fields differently, so each preset lists the pairs of field names in use; the
first pair that the first row has is used.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from rpg_megatron.config.errors import UserError

_DAPO = ("prompt", "reward_model.ground_truth")  # rows in the form of DAPO's release, as for verl
_PAIRS = (("problem", "answer"), ("question", "answer"), ("Problem", "Answer"), _DAPO)


@dataclass(frozen=True)
class Preset:
    """One data set."""

    hub: str
    subset: str | None = None
    split: str = "train"
    fields: tuple[tuple[str, str], ...] = _PAIRS
    """Pairs of problem and answer field."""
    answer_after: str | None = None
    """The answer follows this marker."""
    boxed: tuple[str, ...] = ()
    r"""Answer fields that hold a solution with the answer in a \boxed{}."""
    where: tuple[tuple[str, bool | str], ...] = ()
    """Filter by field values; rows without the field pass."""
    english: bool = False
    """Leave out problems in Chinese."""
    listed: bool = False
    """The answer is the only item of a list."""
    repeated: bool = False
    """Some copies contain each problem several times; use it once."""


PRESETS: dict[str, Preset] = {
    "dapo-math-17k": Preset(
        "open-r1/DAPO-Math-17k-Processed",
        "en",
        fields=(_DAPO, ("prompt", "solution"), *_PAIRS),
        english=True,
        repeated=True,
    ),
    "gsm8k": Preset("openai/gsm8k", "main", fields=(("question", "answer"),), answer_after="####"),
    "math": Preset(
        "DigitalLearningGmbH/MATH-lighteval",
        fields=(("problem", "answer"), ("problem", "solution"), _DAPO),
        boxed=("solution",),
    ),
    "math-500": Preset("HuggingFaceH4/MATH-500", split="test"),
    "aime24": Preset("HuggingFaceH4/aime_2024", repeated=True),
    "aime25": Preset("math-ai/aime25", split="test", repeated=True),
    "amc23": Preset("zwhe99/amc23", split="test", repeated=True),
    "minerva": Preset("math-ai/minervamath", split="test"),
    "olympiadbench": Preset(
        "Hothan/OlympiadBench",
        "OE_TO_maths_en_COMP",
        fields=(("question", "final_answer"), *_PAIRS),
        where=(("is_multiple_answer", False),),
        listed=True,
    ),
}


def find_preset(name: str, key: str = "data") -> Preset:
    """The preset of this name. key: of its source in the settings, for messages.

    Raises UserError with the closest match for an unknown name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = (
            f"did you mean {near[0]!r}? ({', '.join(PRESETS)})"
            if near
            else f"use one of {', '.join(PRESETS)}"
        )
        raise UserError(f"{key}.preset: {name!r} is not known; {hint}")
    return PRESETS[name]

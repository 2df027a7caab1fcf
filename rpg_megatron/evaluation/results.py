"""Evaluation results: graded responses to held-out problems."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EvalResult:
    """One held-out problem with its k responses. All lists have length k, in the order of the responses."""

    prompt_id: int
    """Index of the problem in its data set, from 0."""
    answer: str
    """The reference answer."""
    prompt: str = ""
    """The rendered prompt."""
    responses: list[str] = field(default_factory=list)
    """The decoded responses."""
    correct: list[bool] = field(default_factory=list)
    """Whether the grader accepted each."""
    extracted: list[str | None] = field(default_factory=list)
    """The answer that the grader found in each."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each, end-of-sequence token included."""
    finishes: list[str] = field(default_factory=list)
    """Finish reason of each: "stop" or "length"."""
    set: str = ""
    """Name of the held-out set."""
    failed: int = 0
    """Number of responses for which the reward failed; they count as wrong."""
    classes: list[int | None] = field(default_factory=list)
    """Number of the class of equal answers of each (``classify_answers``); None: no answer. Empty in files of
    earlier versions."""

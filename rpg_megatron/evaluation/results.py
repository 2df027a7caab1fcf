"""What an evaluation brings back: graded responses to held-out problems."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EvalResult:
    """One held-out problem with its k responses. All lists have length k and belong together by position."""

    prompt_id: int
    """Line of the problem in its data set, from 0."""
    answer: str
    """The reference answer."""
    prompt: str = ""
    """The prompt's text, in its template."""
    responses: list[str] = field(default_factory=list)
    """The responses decoded."""
    correct: list[bool] = field(default_factory=list)
    """Whether the verifier accepted each."""
    extracted: list[str | None] = field(default_factory=list)
    """The answer that the verifier found in each."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each, its end-of-sequence token included."""
    finishes: list[str] = field(default_factory=list)
    """Why each ended: "stop" or "length"."""
    set: str = ""
    """Name of the held-out set."""

"""One sampled response with everything the trainer needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


@dataclass
class Trajectory:
    """A prompt and one response to it. Arrays over the response have length R, its last token included.

    Three log-probabilities (nats, at the sampling temperature), each of the sampled token:
    ``behaviour`` the engine's when it sampled, ``old`` the trainer's before the update, ``anchor`` the KL
    anchor's. ``old`` and ``anchor`` are empty until the trainer has computed them.
    """

    prompt_id: int
    """Line of the prompt in its data set, from 0."""
    sample: int
    """Number of the response within its group, from 0."""
    prompt: Tokens
    """Token ids of the prompt, int32 [P]."""
    response: Tokens
    """Token ids of the response, int32 [R]."""
    behaviour: Floats
    """Engine's log-probs, float32 [R]."""
    versions: Tokens
    """Weight version that sampled each token, int32 [R]."""
    finish: str
    """Why it ended: "stop" (end of sequence) or "length" (cut at the limit)."""
    text: str
    """The response decoded."""
    reward: float = 0.0
    """What the advantage is made from."""
    correct: bool = False
    """Whether the verifier accepted the answer; kept apart from the reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """What the reward is the sum of: correctness, overlong, format."""
    answer: str = ""
    """The reference answer, for who reads the journal."""
    extracted: str | None = None
    """The answer that the verifier found in the response."""
    reason: str = ""
    """What decided whether it is correct."""
    old: Floats = field(default_factory=_no_floats)
    """Trainer's log-probs before the update, float32 [R]."""
    anchor: Floats = field(default_factory=_no_floats)
    """KL anchor's log-probs, float32 [R]."""
    group: int = 0
    """Number of its prompt within the step: the same prompt may come up twice in a step, as two groups."""
    advantage: float = 0.0
    """One scalar for every response token."""
    seed: int = 0
    """With which the engine drew it."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt) + len(self.response)


_ARRAYS = ("prompt", "response", "behaviour", "versions", "old", "anchor")
_INTEGERS = ("prompt", "response", "versions")
_SCORED = ("reward", "parts", "correct", "answer", "extracted", "reason", "advantage")
_PLAIN = ("prompt_id", "group", "sample", "finish", "text", "seed", *_SCORED)


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """Everything a trajectory holds, as JSON can hold it; floats in full."""
    row = {name: getattr(trajectory, name) for name in _PLAIN}
    return row | {name: getattr(trajectory, name).tolist() for name in _ARRAYS}


def from_row(row: dict[str, Any]) -> Trajectory:
    """The trajectory that ``to_row`` was given, to the last bit."""
    arrays: dict[str, Any] = {
        name: np.array(row[name], np.int32 if name in _INTEGERS else np.float32) for name in _ARRAYS
    }
    return Trajectory(**{name: value for name, value in row.items() if name not in arrays}, **arrays)

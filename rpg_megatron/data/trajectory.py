"""Trajectory: one sampled response with its log-probs, reward and advantage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]
Routes = NDArray[np.integer[Any]]


def route_dtype(experts: int) -> type[np.integer[Any]]:
    """Type of the indices in ``Trajectory.routes``. experts: number of experts of a layer."""
    return np.uint8 if experts <= 256 else np.int16


NO_ROUTES: Routes = np.zeros((0, 0, 0), np.uint8)


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


def _no_mask() -> Mask:
    return np.zeros(0, bool)


NOT_SAMPLED = -1
"""``Trajectory.versions`` of a token that was not sampled."""


@dataclass
class Trajectory:
    """A prompt and one response. Arrays over the response have length R, end-of-sequence token included.

    A response may hold tokens that the policy did not sample, such as an environment's (``mask``). They are
    part of the sequence, and of nothing else: neither of the loss nor of lengths, comparisons and weights.

    Three log-probabilities of each sampled token (nats, at the sampling temperature): ``behaviour`` by the
    engine when it sampled, ``old`` by the trainer before the update, ``anchor`` by the KL anchor. ``old`` and
    ``anchor`` are empty until the trainer has computed them.
    """

    prompt_id: int
    """Index of the prompt in its data set, from 0."""
    sample: int
    """Index of the response in its group, from 0."""
    prompt: Tokens
    """Token ids of the prompt, int32 [P]."""
    response: Tokens
    """Token ids of the response, int32 [R]."""
    behaviour: Floats
    """Engine's log-probs, float32 [R]; 0 for tokens that it did not sample."""
    versions: Tokens
    """Version of the weights that sampled each token, int32 [R]; ``NOT_SAMPLED`` if none did."""
    finish: str
    """Finish reason: "stop" (end of sequence) or "length" (truncated at the token limit)."""
    text: str
    """The decoded response."""
    reward: float = 0.0
    """The reward that the advantage is computed from."""
    correct: bool = False
    """Whether the grader accepted the answer; independent of the reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the reward: correctness or the terms by name, overlong, format. The reward is their
    weighted sum."""
    answer: str = ""
    """The reference answer, for readers of the rollout files."""
    extracted: str | None = None
    """The answer that the grader found in the response."""
    reason: str = ""
    """Why the answer is correct or not."""
    old: Floats = field(default_factory=_no_floats)
    """Trainer's log-probs before the update, float32 [R]."""
    anchor: Floats = field(default_factory=_no_floats)
    """KL anchor's log-probs, float32 [R]."""
    group: int = 0
    """Index of its group in the step. A prompt that comes twice in a step has two groups."""
    advantage: float = 0.0
    """Advantage, the same for every response token."""
    seed: int = 0
    """Sampling seed."""
    ticket: int = 0
    """Number of its group in the run, in the order of the prompts."""
    branch: int = 0
    """Number of the row in its response. Most responses have one row; an episode that rewrites its history
    starts others, which share group, sample, finish reason and reward. The last one is that of the last
    turn."""
    routes: Routes = field(default_factory=lambda: NO_ROUTES)
    """Router replay: the experts that the engine chose, uint8 or int16 [P + R - 1, layers with experts,
    experts per token]; [0, 0, 0] without router replay. Row i is that of token i, computed by the weights
    that sampled token i + 1 or, if token i + 1 is in the prompt, the response's first token."""
    top_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """The likeliest tokens of a teacher's server at each response token, int32 [R, k]; [0, 0] without them.
    Not in rollout files."""
    top_logps: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Their log-probs, float32 [R, k]."""
    mask: Mask = field(default_factory=_no_mask)
    """Which tokens the policy sampled, bool [R]; the others are in no loss. Default: all of them."""

    def __post_init__(self) -> None:
        if len(self.mask) == 0:
            self.mask = np.ones(len(self.response), bool)

    @property
    def sampled(self) -> int:
        """Number of response tokens that the policy sampled."""
        return int(np.count_nonzero(self.mask))

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt) + len(self.response)

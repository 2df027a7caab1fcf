"""Groups of responses: the tasks that the sampler gives to its workers, and the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from rpg_megatron.data.row_layout import routed_by
from rpg_megatron.data.trajectory import Tokens, Trajectory
from rpg_megatron.rewards.failures import FailureCount


class GroupTask(msgspec.Struct, frozen=True):
    """A group of responses to one prompt, to be generated and graded."""

    ticket: int
    """Number of the group in the run; groups are generated in this order. A group that was discarded
    unfinished may be submitted again, for newer weights."""
    prompt_id: int
    prompt: Tokens
    """Token ids, int32 [P]."""
    answer: str
    """The reference answer."""
    samples: int
    """Number of responses."""
    seed: int
    """Response i is sampled with seed + i."""
    max_tokens: int
    """Token limit of a response."""
    version: int
    """Version of the weights that the engines serve; used if an engine does not report it."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    """None: all tokens."""
    logprobs: bool = True
    interruptible: bool = False
    """Whether a weight update may interrupt its requests, which then resume with the new weights."""
    graded: bool = True
    """Whether responses get a reward."""
    correctness_only: bool = False
    """Compute only the first term of the reward, which decides whether a response is correct."""
    context: str = ""
    """``Prompt.context``, for custom reward functions."""
    set: str = ""
    """Name of the held-out set of the prompt; empty: the training set."""


class Generated(msgspec.Struct, frozen=True):
    """Result of one engine's work on a group."""

    complete: bool
    """Whether all responses are complete; if not, the engine failed or its weights are being updated."""
    resent: int = 0
    """Number of requests that must be sent again."""
    failure: str = ""
    """Why the engine failed; empty if it did not."""


class TrajectorySize(NamedTuple):
    """Size of a trajectory, in tokens."""

    sample: int
    """Number of its response in the group."""
    branch: int
    """``Trajectory.branch``."""
    prompt: int
    response: int
    sampled: int
    routed_by: int = -1
    """``row_layout.routed_by``; in a group without rows of sizes it is the same for all."""


class GroupScores(msgspec.Struct, frozen=True):
    """The part of a graded group that the sampler keeps; all lists are in the order of its responses."""

    lengths: list[int]
    """Tokens of each response that the policy sampled."""
    rewards: list[float]
    correct: list[bool]
    truncated: list[bool]
    parts: dict[str, list[float]]
    """Components of the rewards, and ``env/<name>``: metrics of the episodes."""
    versions: dict[int, int] = {}
    """Number of tokens that each version of the weights sampled."""
    segments: int = 0
    """Number of response segments, each sampled by one version."""
    mixed: int = 0
    """Number of responses sampled by several versions."""
    recomputed: int = 0
    """Number of prompt and response tokens that were prefilled again after a weight update."""
    repeatable: bool = True
    """Whether the group would get the same scores again (``Scorer.repeatable``)."""
    failures: FailureCount = FailureCount()
    """Responses for which the reward failed."""
    rows: list[TrajectorySize] = []
    """The group's trajectories; empty: one for each response, with all of its tokens sampled."""
    turns: list[int] = []
    """Turns of each response; empty as ``rows``."""


class GroupAnswers(msgspec.Struct, frozen=True):
    """The part of a graded group that an evaluation keeps; all lists are in the order of its responses."""

    responses: list[str]
    correct: list[bool]
    extracted: list[str | None]
    classes: list[int | None]
    """Number of the class of equal answers (``classify_answers``)."""
    lengths: list[int]
    """Tokens that the policy sampled."""
    finishes: list[str]


def by_response(group: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The rows of each response of a group."""
    starts = [i for i, t in enumerate(group) if t.branch == 0]
    return [list(group[a:b]) for a, b in pairwise([*starts, len(group)])]


def _turns_of(t: Trajectory) -> int:
    return int(np.count_nonzero(np.diff(t.mask.astype(np.int8), prepend=np.int8(0)) == 1))


def scores_of(group: list[Trajectory]) -> GroupScores:
    """The scores of a group's trajectories."""
    responses = by_response(group)
    first = [rows[0] for rows in responses]
    versions: Counter[int] = Counter()
    segments = recomputed = 0
    for t in group:
        places = np.flatnonzero(t.mask)
        by_place = t.versions[places]
        starts = [0, *(np.flatnonzero(np.diff(by_place)) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            if end > start:
                versions[int(by_place[start])] += end - start
        segments += len(starts)
        recomputed += sum(len(t.prompt) + int(places[start]) for start in starts[1:])
    parts = dict.fromkeys(name for t in first for name in t.parts)
    sizes = [
        TrajectorySize(t.sample, t.branch, len(t.prompt), len(t.response), t.sampled, routed_by(t))
        for t in group
    ]
    plain = len(responses) == len(group) and all(t.mask.all() for t in group)
    plain = plain and len({size.routed_by for size in sizes}) == 1
    return GroupScores(
        lengths=[sum(t.sampled for t in rows) for rows in responses],
        rewards=[t.reward for t in first],
        correct=[t.correct for t in first],
        truncated=[t.finish == "length" for t in first],
        parts={name: [t.parts.get(name, 0.0) for t in first] for name in parts},
        versions=dict(versions),
        segments=segments,
        mixed=sum(len({v for t in rows for v in t.versions[t.mask].tolist()}) > 1 for rows in responses),
        recomputed=recomputed,
        rows=[] if plain else sizes,
        turns=[] if plain else [sum(_turns_of(t) for t in rows) for rows in responses],
    )

"""Index and metrics (rewards, groups without a learning signal, lengths) of a batch of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.groups import GroupScores, TrajectorySize


def index_of_groups(
    groups: Sequence[Group], worker_of: Callable[[int], int], numbers: Sequence[int] | None = None
) -> BatchIndex:
    """The index of graded groups.

    worker_of: prompt id -> number of its worker. numbers: ``BatchIndex.group`` of each; None: 0, 1, 2...
    """
    return BatchIndex.of(
        (
            *(worker_of(g.task.prompt_id), g.task.ticket, number, size.sample, size.branch, row),
            *(size.prompt, size.response, size.sampled, size.routed_by, g.scores.rewards[size.sample]),
        )
        for number, g in zip(numbers or range(len(groups)), groups, strict=True)
        for row, size in enumerate(_sizes(g))
    )


def _sizes(group: Group) -> Sequence[TrajectorySize]:
    prompt = len(group.task.prompt)
    plain = (TrajectorySize(i, 0, prompt, n, n) for i, n in enumerate(group.scores.lengths))
    return group.scores.rows or list(plain)


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics ``reward/*``, ``groups/*`` and ``response/*`` of a batch.

    ``groups/*`` are fractions of the batch's groups, after dynamic sampling: all responses right, all wrong
    (``Trajectory.correct``; for a reward function that returns a number: above 0), and all rewards equal.
    Groups with equal rewards have no learning signal, also under dense rewards. ``response/length_*`` count
    the tokens that the policy sampled. ``env/*``: of turns, if an episode put tokens of its own between them,
    and metrics of the episodes.
    """
    scores = [g.scores for g in groups]
    right = [sum(s.correct) / len(s.correct) for s in scores]
    equal = [len(set(s.rewards)) == 1 for s in scores]
    rewards = np.array([r for s in scores for r in s.rewards], np.float64)
    lengths = np.array([n for s in scores for n in s.lengths], np.float64)
    names = dict.fromkeys(name for s in scores for name in s.parts)
    parts = {
        name if name.startswith("env/") else f"reward/{name}": float(
            np.mean([value for s in scores for value in s.parts.get(name, [0.0] * len(s.rewards))])
        )
        for name in names
    }
    if any(s.rows for s in scores):
        parts |= _turn_metrics(scores)
    return parts | {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": float(np.mean([c for s in scores for c in s.correct])),
        "reward/std": float(rewards.std()),
        "groups/all_right": float(np.mean([share == 1 for share in right])),
        "groups/all_wrong": float(np.mean([share == 0 for share in right])),
        "groups/equal_rewards": float(np.mean(equal)),
        "response/length_mean": float(lengths.mean()),
        "response/length_p50": float(np.quantile(lengths, 0.5)),
        "response/length_p95": float(np.quantile(lengths, 0.95)),
        "response/length_max": float(lengths.max()),
        "response/truncated_frac": float(np.mean([t for s in scores for t in s.truncated])),
    }


def _turn_metrics(scores: Sequence[GroupScores]) -> dict[str, float]:
    responses = sum(len(s.lengths) for s in scores)
    turns = [n for s in scores for n in s.turns or [1] * len(s.lengths)]
    given = sum(row.response - row.sampled for s in scores for row in s.rows)
    return {
        "env/branches": sum(len(s.rows) - len(s.lengths) for s in scores if s.rows) / responses,
        "env/turns": sum(turns) / responses,
        "env/turns_max": float(max(turns)),
        "env/turn_length": sum(n for s in scores for n in s.lengths) / sum(turns),
        "env/given_length": given / responses,
    }

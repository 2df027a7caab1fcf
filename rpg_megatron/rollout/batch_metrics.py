"""Metrics of a batch of groups: rewards, groups without a signal, lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rpg_megatron.rollout.dynamic_sampling import Group


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics ``reward/*``, ``groups/*`` and ``response/*`` of a batch.

    ``groups/*`` are shares of the batch's groups, after dynamic sampling: all responses right, all wrong
    (``Trajectory.correct``: for a reward function that returns a number, above 0), and all rewards equal,
    whatever they are. The last are those without a learning signal, also under dense rewards.
    """
    scores = [g.scores for g in groups]
    right = [sum(s.correct) / len(s.correct) for s in scores]
    equal = [len(set(s.rewards)) == 1 for s in scores]
    rewards = np.array([r for s in scores for r in s.rewards], np.float64)
    lengths = np.array([n for s in scores for n in s.lengths], np.float64)
    parts = {
        f"reward/{name}": float(np.mean([value for s in scores for value in s.parts[name]]))
        for name in scores[0].parts
    }
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

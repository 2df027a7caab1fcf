"""Statistics of the rollout correction by the age of the weights that sampled a token (``rollout.ahead``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpg_megatron.config import Settings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.collectives import sum_arrays
from rpg_megatron.training.loss import build_correction


def correction_by_lag(mine: Sequence[Trajectory], version: int, settings: Settings) -> dict[str, float]:
    """``correction/lag_<n>/ratio_mean`` and ``hit_frac`` for each lag n that has tokens. Collective.

    mine: this leader's trajectories with ``old``; empty on the other ranks. version: that of the weights
    before the update. The lag of a token is the number of updates between the weights that sampled it and
    these. The means over all lags, weighted by tokens, are ``correction/ratio_mean`` and
    ``correction/hit_frac``; like these, they exclude truncated responses if ``training.mask_truncated`` is
    set.
    """
    assert settings.correction is not None
    learnt = [t for t in mine if not (settings.training.mask_truncated and t.finish == "length")]
    found = build_correction(settings.correction)(
        _join((t.old for t in learnt), torch.float32),
        _join((t.behaviour for t in learnt), torch.float32),
        _join((np.full(len(t.old), i) for i, t in enumerate(learnt)), torch.int64),
        sequence_count=len(learnt),
    ).metrics
    lags = version - _join((t.versions for t in learnt), torch.int32)
    most = settings.rollout.ahead
    known = lags <= most  # groups kept from before ``ahead`` was set may be older
    columns = torch.ones(len(lags)), found["correction_ratio"], found["correction_hit"]
    # bincount of no tokens gives integers
    sums = torch.stack([torch.bincount(lags[known], c[known].double(), most + 1).double() for c in columns])
    row = {}
    for lag, (tokens, ratio, hit) in enumerate(sum_arrays(sums.numpy()).T.tolist()):
        if tokens:
            row[f"correction/lag_{lag}/ratio_mean"] = ratio / tokens
            row[f"correction/lag_{lag}/hit_frac"] = hit / tokens
    return row


def _join(parts: Iterable[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *map(torch.from_numpy, parts)])

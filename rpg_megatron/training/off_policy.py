"""How far the policy that sampled a batch, ``behaviour``, is from ``old``, and what the correction does.

Each leader computes sums over its own trajectories. Only sums are exchanged, so that the numbers do not
depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpg_megatron.config import Settings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.objectives import ResponseTokens
from rpg_megatron.objectives.ratios import clamp_log_ratio
from rpg_megatron.system.collectives import sum_arrays
from rpg_megatron.training.loss import build_correction


def off_policy_metrics(trajectories: Sequence[Trajectory], settings: Settings) -> dict[str, float]:
    """``off_policy/*``, and with a correction ``correction/sequences_hit_frac``. Collective.

    trajectories: this leader's, with ``old``; empty on the other ranks. Truncated responses are excluded if
    ``training.mask_truncated`` is set. No metrics without any tokens.
    """
    tokens = _loss_tokens(trajectories, settings)
    log_r, _ = clamp_log_ratio(tokens.old.double() - tokens.behaviour.double())
    responses = torch.zeros(tokens.sequence_count or 0, dtype=torch.float64)
    hits = torch.zeros_like(responses)
    if settings.correction is not None:
        hit = build_correction(settings.correction)(tokens).metrics["correction_hit"]
        hits.index_add_(0, tokens.sequences, hit.double())
    sums = [_weight_sums(log_r), _weight_sums(responses.index_add(0, tokens.sequences, log_r))]
    sums.append(torch.stack([-log_r.sum(), (log_r.expm1() - log_r).sum(), (hits > 0).double().sum()]))
    totals = sum_arrays(torch.cat(sums).numpy()).tolist()
    (count, w, w2, sequences, s, s2), (k1, k3, sequences_hit) = totals[:6], totals[6:]
    if not count:
        return {}
    row = {
        "off_policy/kl_k1": k1 / count,
        "off_policy/kl_k3": k3 / count,
        "off_policy/ess_token": w * w / (count * w2),
        "off_policy/ess_sequence": s * s / (sequences * s2),
    }
    if settings.correction is not None:
        row["correction/sequences_hit_frac"] = sequences_hit / sequences
    return row


def _weight_sums(log_weights: torch.Tensor) -> torch.Tensor:
    """Number of weights, their sum, and the sum of their squares: float64 [3]."""
    w = clamp_log_ratio(log_weights)[0].exp()
    return torch.stack([torch.tensor(float(len(w)), dtype=torch.float64), w.sum(), w.square().sum()])


def correction_by_lag(
    trajectories: Sequence[Trajectory], version: int, settings: Settings
) -> dict[str, float]:
    """``correction/lag_<n>/ratio_mean`` and ``hit_frac`` for each lag n that has tokens. Collective.

    trajectories: this leader's, with ``old``; empty on the other ranks. version: that of the weights before
    the update. The lag of a token is the number of updates between the weights that sampled it and these. The
    means over all lags, weighted by tokens, are ``correction/ratio_mean`` and ``correction/hit_frac``. Both
    exclude truncated responses if ``training.mask_truncated`` is set.
    """
    assert settings.correction is not None
    metrics = build_correction(settings.correction)(_loss_tokens(trajectories, settings)).metrics
    lags = version - _join((t.versions[t.mask] for t in _in_loss(trajectories, settings)), torch.int32)
    most = settings.rollout.ahead
    known = lags <= most  # groups kept from before ``ahead`` was set may be older
    columns = torch.ones(len(lags)), metrics["correction_ratio"], metrics["correction_hit"]
    # bincount of no tokens gives integers
    sums = torch.stack([torch.bincount(lags[known], c[known].double(), most + 1).double() for c in columns])
    row = {}
    for lag, (tokens, ratio, hit) in enumerate(sum_arrays(sums.numpy()).T.tolist()):
        if tokens:
            row[f"correction/lag_{lag}/ratio_mean"] = ratio / tokens
            row[f"correction/lag_{lag}/hit_frac"] = hit / tokens
    return row


def _in_loss(trajectories: Sequence[Trajectory], settings: Settings) -> list[Trajectory]:
    cut = settings.training.mask_truncated
    return [t for t in trajectories if t.sampled and not (cut and t.finish == "length")]


def _loss_tokens(trajectories: Sequence[Trajectory], settings: Settings) -> ResponseTokens:
    """The tokens that are in the loss; ``anchor`` and ``advantages`` are empty."""
    kept = _in_loss(trajectories, settings)
    return ResponseTokens(
        old=_join((t.old[t.mask] for t in kept), torch.float32),
        anchor=torch.zeros(0),
        behaviour=_join((t.behaviour[t.mask] for t in kept), torch.float32),
        advantages=torch.zeros(0),
        sequences=_join((np.full(t.sampled, i) for i, t in enumerate(kept)), torch.int64),
        sequence_count=len(kept),
    )


def _join(parts: Iterable[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *map(torch.from_numpy, parts)])

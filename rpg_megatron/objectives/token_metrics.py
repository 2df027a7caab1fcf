"""Metrics of a loss: one value per response token, under names that the loss chooses.

Each is reduced to one number per step: by the maximum if the name ends in ``_max``, else by the mean over
response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpg_megatron.objectives.divergences import unnormalised_kl

_KEYS = {
    "ratio": "ratio/mean",
    "ratio_max": "ratio/max",
    "kl": "kl/anchor",
    "kl_old": "kl/old",
    "clip_high": "policy/clip_frac_high",
    "clip_low": "policy/clip_frac_low",
    "clip_c": "policy/clip_frac_c",
    "clamped": "policy/log_ratio_clamped",
    "entropy_bonus": "policy/entropy_bonus",
    "correction_ratio": "correction/ratio_mean",
    "correction_hit": "correction/hit_frac",
}
"""Names in built-in losses -> keys in metrics.jsonl. A loss may use these names or any others."""


def metric_key(name: str) -> str:
    """Key in metrics.jsonl of a metric of a loss: as in built-in losses, else ``objective/<name>``."""
    return _KEYS.get(name, f"objective/{name}")


def takes_maximum(name: str) -> bool:
    """Whether a metric is reduced by the maximum over tokens instead of the mean."""
    return name.endswith("_max")


def ratio_metrics(
    w: Tensor, log_u: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor, Tensor], clamped: Tensor
) -> dict[str, Tensor]:
    """The metrics that all built-in losses have; the same shape, detached.

    ``w``, ``log_u``, ``v``: as in ``kl_component``; bounds: boolean masks of where the bounds high, low and c
    acted; clamped: where a log-ratio was outside the limit.
    """
    with torch.no_grad():
        high, low, cut = bounds
        return {
            "ratio": w.detach(),
            "ratio_max": w.detach(),
            "kl": unnormalised_kl(w, log_u, v).detach(),
            # KL to the policy at the start of the step, independent of the anchor.
            "kl_old": unnormalised_kl(w, w.log(), torch.ones_like(w)).detach(),
            "clip_high": high.to(w.dtype),
            "clip_low": low.to(w.dtype),
            "clip_c": cut.to(w.dtype),
            "clamped": clamped.to(w.dtype),
        }

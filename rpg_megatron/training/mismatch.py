"""The guard on engine/trainer mismatch: |old - behaviour| in nats, of tokens that the same weights sampled.

Trainer and engine have the same weights for those tokens, so a difference points at weights, positions,
packing, masks or temperature. Tokens sampled with older weights are expected to differ: they are left out,
and counted. Each leader compares its own tokens; only counts and sums travel between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.data.trajectory import Floats, Trajectory
from rpg_megatron.system.collectives import broadcast_object, control_group, gather_objects

_QUANTILE = 0.99
_CHUNK = 2**20
"""Gaps that are counted at once: counting needs 8 bytes for each."""


@dataclass(frozen=True, order=True)
class WorstToken:
    """The token with the largest gap; the largest of these is that of several leaders."""

    gap: float
    """NaN counts as infinite."""
    order: tuple[int, int]
    """-group, -sample: of equal gaps the first counts."""
    position: int
    length: int
    prompt_id: int
    sample: int
    engine: float
    trainer: float


def check_mismatch(
    mine: Sequence[Trajectory], version: int, settings: GuardSettings, dtype: str, *, leaders: int
) -> tuple[dict[str, float], str | None]:
    """Metrics of ``compare_logprobs``, and a message if the guard finds them out of bounds. Collective.

    The same on every rank; the message names the worst token of all leaders.
    """
    row = compare_logprobs(mine, version, leaders=leaders)
    if not out_of_bounds(row, settings, dtype):
        return row, None
    worst = max(w for w in gather_objects(find_worst(mine, version)) if w)
    return row, describe_mismatch(row, worst, settings, dtype, step=version + 1)


def compare_logprobs(mine: Sequence[Trajectory], version: int, *, leaders: int) -> dict[str, float]:
    """Mean, 99th percentile and maximum of the gap over tokens sampled with weights ``version``. Collective.

    mine: this leader's trajectories in batch order; empty on the other ranks. leaders: their number. Returns
    the same numbers on every rank.
    """
    gap, stale = find_gaps(mine, version)
    if leaders > 1:
        return summarise_sharded(gap, stale, _add_up)
    row: dict[str, float] = broadcast_object(summarise(gap, stale))
    return row


def find_gaps(mine: Sequence[Trajectory], version: int) -> tuple[Floats, int]:
    """The gaps of tokens sampled with weights ``version``, float32 [N], and the number of other tokens."""
    gaps = [np.abs(t.old - t.behaviour)[t.versions == version] for t in mine]
    stale = sum(int((t.versions != version).sum()) for t in mine)
    return np.concatenate(gaps) if gaps else np.zeros(0, np.float32), stale


def summarise(gap: Floats, stale: int) -> dict[str, float]:
    """Metrics of all gaps, [N]."""
    row = {"mismatch/tokens": float(gap.size), "mismatch/stale_tokens": float(stale)}
    if gap.size:
        row |= {
            "mismatch/logp_mean": float(gap.mean(dtype=np.float64)),
            "mismatch/logp_p99": float(np.quantile(gap, _QUANTILE)),
            "mismatch/logp_max": float(gap.max()),
        }
    return row


def summarise_sharded(
    gap: Floats, stale: int, add_up: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> dict[str, float]:
    """``summarise`` of all ranks' gaps together, in constant memory; the mean may differ by rounding.

    add_up: adds an array over the ranks. A gap is a non-negative float32, so gaps sort like their bit
    patterns as integers: counts by the upper 16 bits tell those of the gap at a place in the order, and
    counts by the lower 16 bits, of gaps with these upper bits, tell the rest.
    """
    bits = gap.view(np.uint32)
    sums = add_up(np.concatenate([[gap.sum(dtype=np.float64), stale], _count(bits >> 16)]))
    count = int(sums[2:].sum())
    row = {"mismatch/tokens": float(count), "mismatch/stale_tokens": float(sums[1])}
    if not count:
        return row
    # numpy's place of the quantile in the order, which it computes in the type of the values.
    place = np.float32(count - 1) * np.float32(_QUANTILE)
    before = np.floor(place)
    places = np.minimum([int(before), int(before + np.float32(1)), count - 1], count - 1)
    ends = np.cumsum(sums[2:])
    upper = np.searchsorted(ends, places, side="right")
    chosen = np.unique(upper)
    lower = add_up(np.concatenate([_count(bits[bits >> 16 == u] & 0xFFFF) for u in chosen]))
    found = []
    for k, u in zip(places, upper, strict=True):
        own = np.cumsum(lower.reshape(len(chosen), -1)[np.searchsorted(chosen, u)])
        rest = np.searchsorted(own, k - (ends[u] - sums[2 + u]), side="right")
        found.append((int(u) << 16) + int(rest))
    low, high, largest = np.array(found, np.uint32).view(np.float32)
    # A NaN is larger than all numbers here, and makes all three NaN as in ``summarise``.
    quantile = largest if np.isnan(largest) else np.quantile(np.array([low, high]), float(place - before))
    return row | {
        "mismatch/logp_mean": float(sums[0] / count),
        "mismatch/logp_p99": float(quantile),
        "mismatch/logp_max": float(largest),
    }


def out_of_bounds(row: dict[str, float], settings: GuardSettings, dtype: str) -> bool:
    """Whether the guard is on and the numbers of ``compare_logprobs`` are beyond its thresholds."""
    if settings.mismatch == "off" or "mismatch/logp_max" not in row:
        return False
    largest, mean = settings.thresholds(dtype)
    # Written so that a NaN counts as out of bounds.
    return not (row["mismatch/logp_max"] <= largest and row["mismatch/logp_mean"] <= mean)


def find_worst(mine: Sequence[Trajectory], version: int) -> WorstToken | None:
    """The worst token that weights ``version`` sampled; None without trajectories."""
    found = []
    for t in mine:
        # Stale tokens are left out; a NaN counts as infinite.
        gap = np.where(t.versions == version, np.nan_to_num(np.abs(t.old - t.behaviour), nan=np.inf), -1.0)
        at = int(gap.argmax())
        numbers = float(t.behaviour[at]), float(t.old[at])
        order = -t.group, -t.sample
        found.append(WorstToken(float(gap[at]), order, at, len(gap), t.prompt_id, t.sample, *numbers))
    return max(found, default=None)


def describe_mismatch(
    row: dict[str, float], worst: WorstToken, settings: GuardSettings, dtype: str, step: int
) -> str:
    """The guard's message."""
    largest, mean = settings.thresholds(dtype)
    return (
        f"step {step}: engine and trainer disagree on the log-probs of tokens that the same weights sampled: "
        f"max {row['mismatch/logp_max']:.2e} (bound {largest:.0e}), mean {row['mismatch/logp_mean']:.2e} "
        f"(bound {mean:.0e}) nats; worst at token {worst.position} of {worst.length} of prompt "
        f"{worst.prompt_id}, sample {worst.sample}: engine {worst.engine:.5f}, trainer "
        f"{worst.trainer:.5f}. Run rpg-megatron audit RUN to find where they diverge, or set "
        "guards.mismatch=warn to continue"
    )


def _count(values: NDArray[Any]) -> NDArray[np.float64]:
    """How often each of the 16-bit values occurs, [65536]; in float64, which is exact up to 2^53."""
    counts = np.zeros(1 << 16)
    for start in range(0, len(values), _CHUNK):
        counts += np.bincount(values[start : start + _CHUNK], minlength=1 << 16)
    return counts


def _add_up(values: NDArray[np.float64]) -> NDArray[np.float64]:
    total = torch.from_numpy(values)
    dist.all_reduce(total, group=control_group())
    return total.numpy()

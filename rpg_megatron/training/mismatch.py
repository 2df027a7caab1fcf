"""The mismatch guard: |old - behaviour| in nats, for tokens sampled by the weights that computed ``old``.

For these tokens trainer and engine have the same weights, so a difference indicates wrong weights, positions,
packing, masks or temperature. With top-p, top-k or min-p the engine's log-probs are relative to the kept
tokens: only the part of a difference that this cannot explain counts. Tokens sampled by older weights are
expected to differ: they are excluded, and counted. With ``rollout.ahead`` a batch may have only such tokens.
So the guard also compares probes, which every engine samples after each sync, and checks the mean of each
engine. Each leader compares its own tokens; ranks exchange only counts and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.config.objective import ENOUGH_PROBE_TOKENS, GuardSettings
from rpg_megatron.data.trajectory import Floats, Mask, Trajectory
from rpg_megatron.system.collectives import gather_objects, sum_arrays

_QUANTILE = 0.99
_CHUNK = 2**20
"""Number of gaps counted at once: counting needs 8 bytes for each."""


KNOWN_SIZES = (0.3, 1.0)
"""Sizes of the known adapters (``LoraModel.probe``): the second one turns most models' answers into noise."""
_SEEN = 0.3
"""Engines apply known adapters if their log-probs differ from the trainer's by at most this part of what the
adapters change. Measured in bfloat16 on the quickstart's model: 0.12 (0.003 with the second size), and 0.46
to 1 if the engine ignores the adapters or their scale."""


@dataclass(frozen=True, order=True)
class WorstToken:
    """The token with the largest gap. Instances compare by gap, so the maximum is that of all leaders."""

    gap: float
    """NaN counts as infinite."""
    order: tuple[int, int]
    """(-group, -sample): with equal gaps, the first token in batch order is the largest."""
    position: int
    length: int
    prompt_id: int
    sample: int
    engine: float
    trainer: float
    probed: int = -1
    """Index of the engine whose probe it is; -1: a token of the batch."""


def check_mismatch(
    trajectories: Sequence[Trajectory],
    version: int,
    settings: GuardSettings,
    dtype: str,
    *,
    probes: Sequence[Trajectory] | None = None,
    engines: int = 0,
    excess: float = 0.0,
) -> tuple[dict[str, float], str | None]:
    """Metrics ``mismatch/*``, and a message if they are out of bounds and the guard is on. Collective.

    The result is the same on every rank; the message names the worst token of all leaders. trajectories: this
    leader's, empty on other ranks. probes: this leader's probes, with the engine as ``group``, compared like
    the batch and by ``compare_probes``; None: there are none. engines: number of engines.
    excess: ``RolloutSettings.log_prob_excess``, for the batch only, since probes are sampled from the full
    distribution.
    """
    gap, stale = find_gaps(trajectories, version, excess)
    more, more_stale = find_gaps(probes or (), version)
    row, engine = summarise(np.concatenate([gap, more]), stale + more_stale), -1
    if probes is not None:
        of_probes, engine = compare_probes(probes, version, settings, engines)
        row |= of_probes
    if not out_of_bounds(row, settings, dtype):
        return row, None
    pairs = gather_objects(
        [find_worst(trajectories, version, excess=excess), find_worst(probes or (), version, probes=True)],
        list[WorstToken | None],
    )
    worst = max(w for pair in pairs for w in pair if w)
    return row, describe_mismatch(row, worst, settings, dtype, step=version + 1, engine=engine)


def compare_probes(
    probes: Sequence[Trajectory], version: int, settings: GuardSettings, engines: int
) -> tuple[dict[str, float], int]:
    """``async/probe_tokens``, ``mismatch/logp_engine_*``, and the engine of the latter. Collective.

    ``logp_engine_mean`` is the largest mean gap of an engine on its probes. ``logp_engine_ratio`` is that
    mean relative to the median of the other engines, if there are any. Raises UserError, on all ranks, if the
    guard is on and no engine sampled a probe with weights ``version``.
    """
    sums = np.zeros((2, engines))
    for t in probes:
        gap, _ = find_gaps([t], version)
        sums[:, t.group] += gap.size, gap.sum(dtype=np.float64)
    counts, totals = sum_arrays(sums)
    if settings.mismatch != "off" and not counts.any():
        raise UserError(
            f"step {version + 1}: no engine answered a probe with weights of version {version}, so the guard "
            "on engine/trainer mismatch has nothing to compare; see logs/sampler.log and logs/engine_*.log, "
            "or set guards.mismatch=off to train without the guard"
        )
    means = np.where(counts < ENOUGH_PROBE_TOKENS, 0.0, totals / np.maximum(counts, 1))
    engine = int(means.argmax())  # NaN counts as the largest
    row = {"async/probe_tokens": float(counts.sum()), "mismatch/logp_engine_mean": float(means[engine])}
    others = np.delete(means, engine)[np.delete(counts, engine) >= ENOUGH_PROBE_TOKENS]
    if others.size and counts[engine] >= ENOUGH_PROBE_TOKENS:
        row["mismatch/logp_engine_ratio"] = float(means[engine] / max(np.median(others), 1e-12))
    return row, engine


def check_known_adapters(
    probes: Sequence[Trajectory],
    known: Sequence[Floats],
    own: Sequence[Floats],
    version: int,
    engines: int,
) -> str | None:
    """A message if an engine does not compute with known adapters as the trainer does. Collective.

    probes: this leader's, sampled with the known adapters, with the engine as ``group``. known, own: the
    trainer's log-probs of each with these adapters, and with the run's own. Raises UserError, on all ranks,
    if no engine sampled a probe.
    """
    sums = np.zeros((3, engines))
    for t, with_known, with_own in zip(probes, known, own, strict=True):
        fresh = _comparable(t, version)
        gap, change = np.abs(with_known - t.behaviour), np.abs(with_known - with_own)
        sums[:, t.group] += fresh.sum(), gap[fresh].sum(dtype=np.float64), change[fresh].sum(dtype=np.float64)
    counts, gaps, changes = sum_arrays(sums)
    if not counts.any():
        raise UserError(
            "no engine answered a probe with known adapters (lora); see logs/sampler.log and "
            "logs/engine_*.log, or set guards.mismatch=off to train without the guard"
        )
    # An engine without answers was restarted; its slots were checked when it got the adapters.
    seen = [engine for engine in range(engines) if counts[engine]]
    if all(gaps[engine] <= _SEEN * changes[engine] for engine in seen):  # a NaN is no answer
        return None
    worst = max(
        seen, key=lambda engine: np.nan_to_num(gaps[engine] / max(changes[engine], 1e-12), nan=np.inf)
    )
    return (
        f"before step {version + 1}: known adapters (lora) change the trainer's log-probs by "
        f"{changes[worst] / counts[worst]:.2e} nats on average, and engine {worst} differs from the trainer "
        f"by {gaps[worst] / counts[worst]:.2e}: it does not compute with the adapters that it was given. "
        "See docs/lora.md, or set guards.mismatch=warn to continue"
    )


def find_gaps(trajectories: Sequence[Trajectory], version: int, excess: float = 0.0) -> tuple[Floats, int]:
    """The gaps of tokens sampled with weights ``version``, float32 [N], and the number of other tokens.

    excess: how far the engine's log-prob may exceed the trainer's, in nats; only the rest is a gap.
    """
    comparable = [_comparable(t, version) for t in trajectories]
    gaps = [_gap(t, excess)[chosen] for t, chosen in zip(trajectories, comparable, strict=True)]
    stale = sum(t.sampled - int(chosen.sum()) for t, chosen in zip(trajectories, comparable, strict=True))
    return np.concatenate(gaps) if gaps else np.zeros(0, np.float32), stale


def summarise(
    gap: Floats, stale: int, add_up: Callable[[NDArray[np.float64]], NDArray[np.float64]] = sum_arrays
) -> dict[str, float]:
    """Mean, 99th percentile and maximum of the gaps of all ranks; the same on each. Collective.

    gap, stale: of ``find_gaps`` on this rank. add_up: sums an array over the ranks. Takes constant memory: a
    gap is a non-negative float32, so gaps sort like their bit patterns as integers. Counts by the upper 16
    bits give the upper bits of an order statistic; counts by the lower 16 bits, of gaps with these upper
    bits, give the rest.
    """
    bits = gap.view(np.uint32)
    sums = add_up(np.concatenate([[gap.sum(dtype=np.float64), stale], _count(bits >> 16)]))
    count = int(sums[2:].sum())
    row = {"mismatch/tokens": float(count), "mismatch/stale_tokens": float(sums[1])}
    if not count:
        return row
    # The index of the quantile as numpy computes it, in the dtype of the values.
    index = np.float32(count - 1) * np.float32(_QUANTILE)
    before = np.floor(index)
    indices = np.minimum([int(before), int(before + np.float32(1)), count - 1], count - 1)
    ends = np.cumsum(sums[2:])
    upper = np.searchsorted(ends, indices, side="right")
    chosen = np.unique(upper)
    lower = add_up(np.concatenate([_count(bits[bits >> 16 == u] & 0xFFFF) for u in chosen]))
    patterns = []
    for k, u in zip(indices, upper, strict=True):
        cumulative = np.cumsum(lower.reshape(len(chosen), -1)[np.searchsorted(chosen, u)])
        rest = np.searchsorted(cumulative, k - (ends[u] - sums[2 + u]), side="right")
        patterns.append((int(u) << 16) + int(rest))
    low, high, largest = np.array(patterns, np.uint32).view(np.float32)
    # A NaN sorts above all numbers here, and makes all three NaN.
    quantile = largest if np.isnan(largest) else np.quantile(np.array([low, high]), float(index - before))
    return row | {
        "mismatch/logp_mean": float(sums[0] / count),
        "mismatch/logp_p99": float(quantile),
        "mismatch/logp_max": float(largest),
    }


def out_of_bounds(row: dict[str, float], settings: GuardSettings, dtype: str) -> bool:
    """Whether the guard is on and the metrics exceed its bounds."""
    if settings.mismatch == "off" or "mismatch/logp_max" not in row:
        return False
    largest, mean = settings.thresholds(dtype)
    of_engine = row.get("mismatch/logp_engine_mean", 0.0)
    means = row["mismatch/logp_mean"], of_engine
    # Written so that a NaN counts as out of bounds.
    if not (row["mismatch/logp_max"] <= largest and all(m <= mean for m in means)):
        return True
    return settings.engine_differs(of_engine, row.get("mismatch/logp_engine_ratio", 0.0), dtype)


def find_worst(
    trajectories: Sequence[Trajectory], version: int, *, probes: bool = False, excess: float = 0.0
) -> WorstToken | None:
    """The token with the largest gap of those sampled by weights ``version``; None without trajectories.

    excess: as in ``find_gaps``. probes: whether these are probes, with the engine as ``group``.
    """
    tokens = []
    for t in trajectories:
        # Stale tokens are excluded, and those that were not sampled; a NaN counts as infinite.
        gap = np.where(_comparable(t, version), np.nan_to_num(_gap(t, excess), nan=np.inf), -1.0)
        at = int(gap.argmax())
        numbers = float(t.behaviour[at]), float(t.old[at])
        order = -t.group, -t.sample
        token = WorstToken(float(gap[at]), order, at, len(gap), t.prompt_id, t.sample, *numbers)
        tokens.append(replace(token, probed=t.group) if probes else token)
    return max(tokens, default=None)


def describe_mismatch(
    row: dict[str, float],
    worst: WorstToken,
    settings: GuardSettings,
    dtype: str,
    step: int,
    engine: int = -1,
) -> str:
    """The guard's message. engine: that of ``mismatch/logp_engine_mean``, if the row has it."""
    largest, mean = settings.thresholds(dtype)
    of_engine = row.get("mismatch/logp_engine_mean", 0.0)
    ratio, by_engine = row.get("mismatch/logp_engine_ratio", 0.0), ""
    if not of_engine <= mean or settings.engine_differs(of_engine, ratio, dtype):
        by_engine = f", on probes of engine {engine} mean {of_engine:.2e}"
        by_engine += f" ({ratio:.1f} times that of the others)" if ratio else ""
    source = "" if worst.probed < 0 else f" (probe of engine {worst.probed})"
    return (
        f"step {step}: engine and trainer disagree on the log-probs of tokens that the same weights sampled: "
        f"max {row['mismatch/logp_max']:.2e} (bound {largest:.0e}), mean {row['mismatch/logp_mean']:.2e} "
        f"(bound {mean:.0e}) nats{by_engine}; worst at token {worst.position} of {worst.length} of prompt "
        f"{worst.prompt_id}, sample {worst.sample}{source}: engine {worst.engine:.5f}, trainer "
        f"{worst.trainer:.5f}. Run rpg-megatron audit RUN to find where they diverge, or set "
        "guards.mismatch=warn to continue"
    )


def _comparable(t: Trajectory, version: int) -> Mask:
    """Which tokens the weights ``version`` sampled, from what the trainer computes too: bool [R].

    With router replay, none of a response that a weight update interrupted: the trainer replays the routes of
    the older weights for the tokens before the update, which the engine computed again with its own.
    """
    fresh: Mask = t.mask & (t.versions == version)
    mixed = t.routes.size > 0 and bool((t.versions[t.mask] != version).any())
    return np.zeros_like(fresh) if mixed else fresh


def _gap(t: Trajectory, excess: float) -> Floats:
    """Difference of engine and trainer beyond ``excess``, not negative: float32 [R]."""
    off: Floats = t.old - t.behaviour
    # The outer abs turns -0.0 into 0.0: gaps are sorted by their bits.
    return np.abs(np.maximum(np.maximum(off, -off - np.float32(excess)), np.float32(0)) if excess else off)


def _count(values: NDArray[Any]) -> NDArray[np.float64]:
    """How often each 16-bit value occurs: [65536], float64, which is exact up to 2^53."""
    counts = np.zeros(1 << 16)
    for start in range(0, len(values), _CHUNK):
        counts += np.bincount(values[start : start + _CHUNK], minlength=1 << 16)
    return counts

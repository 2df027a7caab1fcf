"""Changes of accuracy and reward during a run, and whether they exceed the sampling noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, Literal, NamedTuple

from rpg_megatron.commands.report.run_files import RunFiles, run_ends

HELDOUT_LOSS = "sft/heldout_loss"
_LOSS_NOISE = 0.01  # relative change that is no clear change: the held-out loss has no sampling noise
_Z = 2.0  # standard errors in an interval: about 95%


def is_accuracy(key: str) -> bool:
    """Whether a metric is the held-out accuracy of a set."""
    return key.startswith("eval/") and "/avg@" in key


class Interval(NamedTuple):
    """Confidence interval of a measured value."""

    low: float
    high: float

    @property
    def margin(self) -> float:
        """Half of the width."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Change:
    """A metric at the start and at the end of a run."""

    name: str
    before: float
    after: float
    ranges: tuple[Interval, Interval] | None
    """Intervals of both values; None if their noise is unknown."""
    best: tuple[int, float] | None = None
    """Of evaluations: step and value of the best one, the earliest of equal ones."""

    @property
    def margin(self) -> float | None:
        """Margin of error of the difference, towards no change (Newcombe's method); None if unknown."""
        if self.ranges is None:
            return None
        before, after = self.ranges
        if self.after > self.before:
            return math.hypot(self.after - after.low, before.high - self.before)
        return math.hypot(after.high - self.after, self.before - before.low)

    @property
    def verdict(self) -> Literal["up", "down", "flat", "unknown"]:
        """Direction of the change, for a loss up if it fell; flat: within its margin of error."""
        change, margin = self.after - self.before, self.margin
        if self.name == HELDOUT_LOSS:
            change, margin = -change, _LOSS_NOISE * abs(self.before)
        if margin is None:
            return "unknown"
        return "flat" if abs(change) <= margin else "up" if change > 0 else "down"


def find_changes(run: RunFiles, sizes: Mapping[str, int]) -> list[Change]:
    """Held-out loss, held-out accuracy of each set, training accuracy and reward, before and after.

    sizes: problems in each held-out set, if known. Held-out values are single evaluations; training values
    are means over the first and the last tenth of the steps, at most ten.
    """
    changes = []
    if len(losses := run.series(HELDOUT_LOSS)) > 1:
        changes.append(Change(HELDOUT_LOSS, losses[0][1], losses[-1][1], None))
    for key in dict.fromkeys(k for row in run.rows for k in row if is_accuracy(k)):
        if len(series := run.series(key)) > 1:
            ends = series[0][1], series[-1][1]
            # Responses to one problem are correlated, so count problems, not responses.
            problems = sizes.get(key.split("/")[1], sizes.get("", 0))
            known = problems and min(ends) >= 0 and max(ends) <= 1
            ranges = (wilson(ends[0], problems), wilson(ends[1], problems)) if known else None
            best = max(series, key=lambda point: point[1])
            changes.append(Change(key.removeprefix("eval/"), *ends, ranges, best))
    for key in ("reward/accuracy", "reward/mean"):
        if len(series := run.series(key)) > 1:
            first, last = run_ends(series)
            before, after = _training_interval(run, key, first), _training_interval(run, key, last)
            means = fmean(value for _, value in first), fmean(value for _, value in last)
            changes.append(Change(key, *means, None if before is None or after is None else (before, after)))
    return changes


def wilson(share: float, number: float) -> Interval:
    """Wilson's score interval of a proportion measured on ``number`` independent cases."""
    weight = _Z**2 / number
    centre = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / number + weight / (4 * number))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def _training_interval(run: RunFiles, key: str, part: Sequence[tuple[int, float]]) -> Interval | None:
    """Interval of the mean over a few steps: the wider one by number of prompts or by variance of steps."""
    values = [value for _, value in part]
    intervals = []
    prompts = run.config.get("rollout.prompts_per_step")
    if isinstance(prompts, int) and prompts > 0:
        number = prompts * len(part)
        if key == "reward/accuracy" and 0 <= fmean(values) <= 1:
            intervals.append(wilson(fmean(values), number))
        deviations = dict(run.series("reward/std"))
        known = [deviations[step] for step, _ in part if step in deviations]
        if key == "reward/mean" and known:
            intervals.append(_around(fmean(values), fmean(known) / math.sqrt(number)))
    if len(values) > 2:
        intervals.append(_around(fmean(values), math.sqrt(variance(values) / len(values))))
    return max(intervals, key=lambda interval: interval.margin, default=None)


def _around(value: float, error: float) -> Interval:
    return Interval(value - _Z * error, value + _Z * error)


def change_as_plain(change: Change) -> dict[str, Any]:
    """The change as a dict for JSON, with verdict and margins."""
    margins = [interval.margin for interval in change.ranges] if change.ranges else [None, None]
    return vars(change) | {"margin": change.margin, "margins": margins, "verdict": change.verdict}

"""Means over seeds and differences between arms, with 95% intervals by Student's t distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, variance
from typing import NamedTuple

from rpg_megatron.commands.report.changes import Interval


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    margin: float | None
    """Half of the 95% t-interval of the mean; None for one value."""
    number: int
    """Number of seeds."""


class Difference(NamedTuple):
    """Mean of one arm minus that of another."""

    value: float
    interval: Interval | None
    """95% interval; None if an arm has one seed, or if all values of both are equal."""
    paired: bool
    """Whether it is the mean over differences between runs of the same seed; otherwise Welch's interval."""

    @property
    def verdict(self) -> str:
        """``higher``, ``lower``, ``unclear`` (the interval holds 0) or ``unknown`` (no interval)."""
        if self.interval is None:
            return "unknown"
        return "higher" if self.interval.low > 0 else "lower" if self.interval.high < 0 else "unclear"


@lru_cache(maxsize=4096)
def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t distribution. freedom: degrees of freedom, 1 or more."""
    # With t = sqrt(freedom) tan(a), the density of the angle a is proportional to cos(a) ** (freedom - 1).
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angle, parts = 0.0, 200
    for _ in range(30):  # Newton's method; the share within ±angle, by Simpson's rule, is concave
        values = [math.cos(angle * i / parts) ** (freedom - 1) for i in range(parts + 1)]
        total = values[0] + values[-1] + 4 * math.fsum(values[1::2]) + 2 * math.fsum(values[2:-1:2])
        angle += (0.95 / scale / 2 - angle / parts / 3 * total) / values[-1]
    return math.sqrt(freedom) * math.tan(angle)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean over seeds with its 95% t-interval; None without a value."""
    if not values:
        return None
    number = len(values)
    margin = t_quantile(number - 1) * math.sqrt(variance(values) / number) if number > 1 else None
    return Estimate(fmean(values), margin, number)


def compare(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Mean of ``first`` minus mean of ``second``, each by seed; None if one of them is empty."""
    if not first or not second:
        return None
    value, paired = fmean(first.values()) - fmean(second.values()), first.keys() == second.keys()
    if min(len(first), len(second)) < 2:
        return Difference(value, None, paired)
    if paired:
        square = variance([first[seed] - second[seed] for seed in first]) / len(first)
        freedom = len(first) - 1.0
    else:
        parts = [variance(values.values()) / len(values) for values in (first, second)]
        square = sum(parts)
        # Welch and Satterthwaite. By shares, because squares of the parts may overflow.
        share = parts[0] / square if square else 0.5
        freedom = 1 / (share**2 / (len(first) - 1) + (1 - share) ** 2 / (len(second) - 1))
    largest = max(map(abs, (*first.values(), *second.values())))
    if math.sqrt(square) <= 1e-12 * largest:  # equal but for rounding: the spread of seeds is not known
        return Difference(value, None, paired)
    margin = t_quantile(freedom) * math.sqrt(square)
    return Difference(value, Interval(value - margin, value + margin), paired)

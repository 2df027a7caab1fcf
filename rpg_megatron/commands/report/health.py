"""Health checks of a run's metrics: short statements, each with a verdict.

Bounds are rules of thumb, except those of the mismatch guard. ``docs/report.md`` lists them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from rpg_megatron.commands.report.run_files import RunFiles
from rpg_megatron.config.objective import GuardSettings

_FEW = 10
"""Steps averaged at the start and at the end of a run; fewer in a short run."""
_TRUNCATED, _ENTROPY, _SPIKE, _CLIPPED = 0.2, 0.02, 10.0, 0.2


@dataclass(frozen=True)
class HealthCheck:
    """One property of a run."""

    name: str
    verdict: Literal["good", "warn", "bad"]
    text: str


@dataclass(frozen=True)
class Change:
    """A metric at the start and at the end of a run."""

    name: str
    before: float
    after: float
    error: float | None
    """Standard error of the difference, None if unknown."""

    @property
    def verdict(self) -> Literal["up", "down", "flat"]:
        """Direction of the change; flat: less than two standard errors."""
        change = self.after - self.before
        if abs(change) <= 2 * (self.error or 0.0):
            return "flat"
        return "up" if change > 0 else "down"


def find_changes(run: RunFiles, sizes: Mapping[str, int]) -> list[Change]:
    """Held-out accuracy of each set, training accuracy and reward, before and after.

    sizes: problems in each held-out set, if known. Held-out values are single evaluations; training values
    are means over the first and the last tenth of the steps, at most ten, whose variance gives the error.
    """
    found = []
    for key in dict.fromkeys(k for row in run.rows for k in row if k.startswith("eval/") and "/avg@" in k):
        values = [value for _, value in run.series(key)]
        if len(values) > 1:
            error = None
            # Responses to one problem are correlated, so count problems, not responses.
            if problems := sizes.get(key.split("/")[1], sizes.get("", 0)):
                error = math.sqrt(sum(v * (1 - v) for v in (values[0], values[-1])) / problems)
            found.append(Change(key.removeprefix("eval/"), values[0], values[-1], error))
    for key in ("reward/accuracy", "reward/mean"):
        values = [value for _, value in run.series(key)]
        if len(values) > 1:
            first, last = _ends(values)
            found.append(Change(key, _mean(first), _mean(last), _error(first, last)))
    return found


def check_health(run: RunFiles) -> list[HealthCheck]:
    """The checks that this run's metrics allow, failures first."""
    order = {"bad": 0, "warn": 1, "good": 2}
    return sorted(_checks(run), key=lambda check: order[check.verdict])


def _checks(run: RunFiles) -> Iterator[HealthCheck]:
    yield _check_end(run)
    if not run.rows:
        return
    yield _check_finite(run)
    yield from _check_mismatch(run)
    yield from _check_entropy(run)
    yield from _check_truncation(run)
    yield from _check_gradient(run)
    yield from _check_clipping(run)
    if any("engine/restarts" in row for row in run.rows):
        restarts = int(sum(value for _, value in run.series("engine/restarts")))
        yield HealthCheck("engines", "warn" if restarts else "good", _times(restarts, "restart"))


def _check_end(run: RunFiles) -> HealthCheck:
    planned = f" of {run.planned}" if run.planned else ""
    if run.summary:
        return HealthCheck("end", "good", f"finished, {run.steps} steps")
    if run.running:
        return HealthCheck("end", "good", f"running, step {run.steps}{planned}")
    return HealthCheck("end", "warn", f"not finished: ended at step {run.steps}{planned}")


def _check_finite(run: RunFiles) -> HealthCheck:
    odd = [(int(row["step"]), key) for row in run.rows for key in row if not math.isfinite(row[key])]
    if not odd:
        return HealthCheck("numbers", "good", "all finite")
    names = [name for name, _ in Counter(key for _, key in odd).most_common(3)]
    return HealthCheck("numbers", "bad", f"NaN or infinite from step {odd[0][0]} on: {', '.join(names)}")


def _check_mismatch(run: RunFiles) -> Iterator[HealthCheck]:
    largest, mean = run.series("mismatch/logp_max"), run.series("mismatch/logp_mean")
    if not largest or not mean:
        return
    dtype = str(run.config.get("precision.dtype", "bfloat16"))
    fields = {k: run.config.get(f"guards.{k}") for k in GuardSettings.model_fields}
    try:
        guards = GuardSettings.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError:
        guards = GuardSettings.model_validate({})
    bounds = guards.thresholds(dtype)
    (_, worst), (step, average) = max(largest, key=_value), max(mean, key=_value)
    over = worst > bounds[0] or average > bounds[1]
    bound = "" if math.isinf(bounds[0]) else f" (bound {bounds[0]:.2g})"
    text = f"mean {average:.2g} (bound {bounds[1]:.2g}), max {worst:.2g}{bound} nats"
    yield HealthCheck(
        "mismatch", "bad" if over else "good", text + (f"; worst at step {step}" if over else "")
    )


def _check_entropy(run: RunFiles) -> Iterator[HealthCheck]:
    values = [value for _, value in run.series("policy/entropy")]
    if len(values) < 2:
        return
    first, last = (_mean(part) for part in _ends(values))
    text = f"{first:.3g} → {last:.3g} nats per token"
    if last < _ENTROPY * first:
        yield HealthCheck("entropy", "warn", f"{text}: collapsed")
    elif last > 3 * first and last > 1:
        yield HealthCheck("entropy", "warn", f"{text}: grows")
    else:
        yield HealthCheck("entropy", "good", text)


def _check_truncation(run: RunFiles) -> Iterator[HealthCheck]:
    values = [value for _, value in run.series("response/truncated_frac")]
    if values:
        last = _mean(_ends(values)[1])
        text = f"{last:.1%} of the last responses were cut off at the limit"
        yield HealthCheck("length", "warn" if last > _TRUNCATED else "good", text)


def _check_gradient(run: RunFiles) -> Iterator[HealthCheck]:
    norms = run.series("policy/grad_norm")
    if not norms:
        return
    middle = sorted(value for _, value in norms)[len(norms) // 2]
    spikes = [(step, value) for step, value in norms if value > _SPIKE * middle]
    text = f"median norm {middle:.3g}, largest {max(norms, key=_value)[1]:.3g}"
    if spikes:
        at = ", ".join(str(step) for step, _ in spikes[:3]) + (", …" if len(spikes) > 3 else "")
        text += f"; {_times(len(spikes), 'spike')} over {_SPIKE:.0f} times the median (step {at})"
    yield HealthCheck("gradient", "warn" if spikes else "good", text)


def _check_clipping(run: RunFiles) -> Iterator[HealthCheck]:
    sides = [run.series(f"policy/clip_frac_{side}") for side in ("high", "low", "c")]
    if not all(sides):
        return
    worst = max(_mean(_ends([value for _, value in side])[1]) for side in sides)
    total = sum(_mean(_ends([value for _, value in side])[1]) for side in sides)
    text = f"{total:.2%} of the tokens in the last steps"
    yield HealthCheck("clipping", "warn" if worst > _CLIPPED else "good", text)


def _value(item: tuple[int, float]) -> float:
    return item[1]


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    few = max(1, min(_FEW, len(values) // 10))
    return values[:few], values[-few:]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(first: Sequence[float], last: Sequence[float]) -> float | None:
    """Standard error of the difference of two means; None if there are fewer than 3 values."""
    if len(first) < 3:
        return None
    spread = [math.fsum((v - _mean(part)) ** 2 for v in part) / (len(part) - 1) for part in (first, last)]
    return math.sqrt(sum(spread) / len(first))


def _times(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def as_plain(item: HealthCheck | Change) -> dict[str, Any]:
    """As a dict for JSON, with the verdict."""
    return {"verdict": item.verdict, **vars(item)}

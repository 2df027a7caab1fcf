"""Health checks of a run's metrics: each has a short text and a verdict.

Bounds are rules of thumb, except those of the mismatch guard. ``docs/report.md`` lists them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pydantic import ValidationError

from rpg_megatron.commands.report.run_files import RunFiles, mean, run_ends
from rpg_megatron.config.files import read_text
from rpg_megatron.config.objective import REWARD_FAILURES_SHARE, GuardSettings
from rpg_megatron.engine.command import RUNNER_VARIABLE
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS

_OVERFITTED = 1.02
_TRUNCATED, _ENTROPY, _SPIKE, _CLIPPED, _SILENT = 0.2, 0.02, 10.0, 0.2, 0.9


@dataclass(frozen=True)
class HealthCheck:
    """One property of a run."""

    name: str
    verdict: Literal["good", "warn", "bad"]
    text: str


def check_health(run: RunFiles) -> list[HealthCheck]:
    """The checks for which the run has metrics, failures first."""
    order = {"bad": 0, "warn": 1, "good": 2}
    return sorted(_checks(run), key=lambda check: order[check.verdict])


def _checks(run: RunFiles) -> Iterator[HealthCheck]:
    yield _check_end(run)
    if not run.rows:
        return
    yield _check_finite(run)
    yield from _check_skipped(run)
    yield from _check_rewards(run)
    yield from _check_tools(run)
    yield from _check_mismatch(run)
    yield from _check_held_out_loss(run)
    yield from _check_entropy(run)
    yield from _check_truncation(run)
    # Distillation may train on any rewards, or none.
    unused = run.config.get("objective.type") == "distil" and not run.config.get("objective.reward")
    silent = set() if unused else _steps_without_signal(run)
    if not unused:
        yield from _check_signal(run, silent)
    yield from _check_gradient(run, silent)
    yield from _check_clipping(run)
    if any("engine/restarts" in row for row in run.rows):
        restarts = int(sum(value for _, value in run.series("engine/restarts")))
        text, fell_back = _times(restarts, "restart"), _uses_runner_v1(run)
        if fell_back:
            text += "; with vLLM's model runner V1, because V2 did not start: see logs/launcher.log"
        yield HealthCheck("engines", "warn" if restarts or fell_back else "good", text)


def _uses_runner_v1(run: RunFiles) -> bool:
    """Whether an engine was started once more with another model runner (``launcher.engines``)."""
    try:
        text = read_text(run.folder / LOGS / LAUNCHER_LOG, run.folder)
    except (OSError, ValueError):
        return False
    return f"({RUNNER_VARIABLE}=0)" in text


def _check_end(run: RunFiles) -> HealthCheck:
    planned = f" of {run.planned}" if run.planned else ""
    if run.finished:
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


def _check_skipped(run: RunFiles) -> Iterator[HealthCheck]:
    values = run.series("policy/skipped_updates")
    steps = [step for step, value in values if value > 0]
    if steps:
        total = int(sum(value for _, value in values))
        text = f"{_times(total, 'update')} skipped (step {_first(steps)}): the gradient was not finite"
        yield HealthCheck("updates", "warn", text)
    elif values:
        yield HealthCheck("updates", "good", "none skipped")


def _check_held_out_loss(run: RunFiles) -> Iterator[HealthCheck]:
    series = run.series("sft/heldout_loss")
    if len(series) < 2:
        return
    (_, first), (_, last), (best, least) = series[0], series[-1], min(series, key=_value)
    text = f"{first:.4g} before, {last:.4g} after"
    if last > _OVERFITTED * least:
        text += f"; least {least:.4g}, at step {best}: later steps overfit (fewer sft.epochs, more data)"
        yield HealthCheck("held-out loss", "warn", text)
    else:
        yield HealthCheck("held-out loss", "good" if last < first else "warn", text)


def _check_mismatch(run: RunFiles) -> Iterator[HealthCheck]:
    largest = run.series("mismatch/logp_max")
    means = run.series("mismatch/logp_mean") + run.series("mismatch/logp_engine_mean")
    if not largest or not means:
        return
    dtype, guards = str(run.config.get("precision.dtype", "bfloat16")), _read_guards(run)
    bounds = guards.thresholds(dtype)
    (_, worst), (step, average) = max(largest, key=_value), max(means, key=_value)
    ratios = dict(run.series("mismatch/logp_engine_ratio"))
    differs = [
        (number, ratios[number])
        for number, value in run.series("mismatch/logp_engine_mean")
        if number in ratios and guards.engine_differs(value, ratios[number], dtype)
    ]
    over = worst > bounds[0] or average > bounds[1]
    bound = "" if math.isinf(bounds[0]) else f" (bound {bounds[0]:.2g})"
    text = f"mean {average:.2g} (bound {bounds[1]:.2g}), max {worst:.2g}{bound} nats"
    if differs and not over:
        number, ratio = max(differs, key=_value)
        text += f"; at step {number:.0f} the mismatch of one engine is {ratio:.0f} times that of the others"
    yield HealthCheck(
        "mismatch", "bad" if over or differs else "good", text + (f"; worst at step {step}" if over else "")
    )


def _read_guards(run: RunFiles) -> GuardSettings:
    """The run's guards; the default ones if they cannot be read."""
    known = {k: f"guards.{k}" for k in GuardSettings.model_fields}
    try:
        return GuardSettings.model_validate({k: run.config[v] for k, v in known.items() if v in run.config})
    except ValidationError:
        return GuardSettings.model_validate({})


def _check_rewards(run: RunFiles) -> Iterator[HealthCheck]:
    keys = sorted({key for row in run.rows for key in row if key.endswith("/failed_frac")})
    points = [(value, step, key) for key in keys for step, value in run.series(key)]
    if not points:
        return
    steps = {step for value, step, _ in points if value > 0}
    if not steps:
        yield HealthCheck("rewards", "good", "the reward failed on no response")
        return
    worst, step, key = max(points)
    where = "responses" if key.startswith("reward/") else f"responses of {key.split('/')[1]}"
    text = f"the reward failed in {_times(len(steps), 'step')}"
    text += f", on up to {worst:.1%} of the {where} (step {step})"
    bad = worst >= REWARD_FAILURES_SHARE
    yield HealthCheck("rewards", "bad" if bad else "warn", text)


def _check_tools(run: RunFiles) -> Iterator[HealthCheck]:
    tools = sorted(
        {key.removesuffix("_raised") for row in run.rows for key in row if key.endswith("_raised")}
    )
    for tool in tools:
        calls, errors, raised = (
            sum(value for _, value in run.series(f"{tool}_{kind}")) for kind in ("calls", "errors", "raised")
        )
        if not calls:
            continue
        text = f"{tool.removeprefix('env/')}: {errors / calls:.1%} of the calls failed"
        if raised:
            text += (
                f"; {raised / calls:.1%} by exceptions of the tool, of which the sampler's log has the first"
            )
        yield HealthCheck("tools", "warn" if raised > 0.01 * calls or errors > 0.9 * calls else "good", text)


def _check_entropy(run: RunFiles) -> Iterator[HealthCheck]:
    values = [value for _, value in run.series("policy/entropy")]
    if len(values) < 2:
        return
    first, last = (mean(part) for part in run_ends(values))
    text = f"{first:.3g} → {last:.3g} nats per token"
    if last < _ENTROPY * first:
        yield HealthCheck("entropy", "warn", f"{text}: collapsed")
    elif last > 3 * first and last > 1:
        yield HealthCheck("entropy", "warn", f"{text}: grows")
    else:
        yield HealthCheck("entropy", "good", text)


def _check_truncation(run: RunFiles) -> Iterator[HealthCheck]:
    values = run.series("response/truncated_frac")
    if values:
        last = mean(run_ends([value for _, value in values])[1])
        text = f"{last:.1%} of the last responses were truncated"
        if whole := [step for step, value in values if value == 1]:
            text += f"; all responses in {_times(len(whole), 'step')} ({_first(whole)})"
        yield HealthCheck("length", "warn" if whole or last > _TRUNCATED else "good", text)


def _steps_without_signal(run: RunFiles) -> set[int]:
    """Steps in which all rewards of each group, or of the batch, were equal: all advantages are 0."""
    silent = {step for step, value in run.series("reward/std") if value == 0}
    if _compares_within_groups(run):
        silent |= {step for step, value in run.series("groups/equal_rewards") if value == 1}
    return silent


def _compares_within_groups(run: RunFiles) -> bool:
    """Whether a group of equal rewards has no learning signal."""
    kind = run.config.get("advantage.type", "rpg")
    return kind in ("rpg", "grpo", "leave_one_out") and run.config.get("rollout.samples_per_prompt") != 1


def _check_signal(run: RunFiles, silent: set[int]) -> Iterator[HealthCheck]:
    steps = [step for step, _ in run.series("reward/std")]
    equal = run.series("groups/equal_rewards") if _compares_within_groups(run) else []
    if not steps and not equal:
        return
    last = mean([value for _, value in run_ends(equal)[1]]) if equal else 0.0
    remarks = [f"{last:.0%} of the last groups had equal rewards"] if equal else []
    if silent:
        remarks.append(
            f"no signal in {_times(len(silent), 'step')} ({_first(sorted(silent))}): all rewards were equal"
        )
    yield HealthCheck(
        "signal", "warn" if silent or last > _SILENT else "good", "; ".join(remarks) or "rewards differ"
    )


def _check_gradient(run: RunFiles, silent: set[int]) -> Iterator[HealthCheck]:
    # Without steps where all rewards are equal: their gradient is that of the KL only, and much smaller.
    norms = [(step, value) for step, value in run.series("policy/grad_norm") if step not in silent]
    if not norms:
        return
    middle = median(value for _, value in norms)
    spikes = [(step, value) for step, value in norms if value > _SPIKE * middle]
    text = f"median norm {middle:.3g}, largest {max(norms, key=_value)[1]:.3g}"
    if spikes:
        at = _first([step for step, _ in spikes])
        text += f"; {_times(len(spikes), 'spike')} over {_SPIKE:.0f} times the median (step {at})"
    yield HealthCheck("gradient", "warn" if spikes else "good", text)


def _check_clipping(run: RunFiles) -> Iterator[HealthCheck]:
    sides = [run.series(f"policy/clip_frac_{side}") for side in ("high", "low", "c")]
    if not all(sides):
        return
    worst = max(mean(run_ends([value for _, value in side])[1]) for side in sides)
    total = sum(mean(run_ends([value for _, value in side])[1]) for side in sides)
    text = f"{total:.2%} of the tokens in the last steps"
    yield HealthCheck("clipping", "warn" if worst > _CLIPPED else "good", text)


def _value(item: tuple[int, float]) -> float:
    return item[1]


def _first(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:3])) + (", …" if len(steps) > 3 else "")


def _times(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"

"""Health checks of a run's metrics: each has a short text and a verdict.

Bounds are rules of thumb, except those of the mismatch guard. ``docs/report.md`` lists them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import fmean, median
from typing import Literal

from pydantic import ValidationError

from rpg_megatron.commands.report.run_files import RunFiles, run_ends
from rpg_megatron.config.files import read_text
from rpg_megatron.config.objective import REWARD_FAILURES_SHARE, GuardSettings
from rpg_megatron.engine.command import RUNNER_VARIABLE
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS

_OVERFITTED = 1.02
_TRUNCATED, _ENTROPY, _SPIKE, _CLIPPED, _SILENT = 0.2, 0.02, 10.0, 0.2, 0.9

_value = itemgetter(1)  # of (step, value)
Verdict = Literal["good", "warn", "bad"]
Checks = Iterator[tuple[str, Verdict | bool, str]]
"""Name, verdict (or whether to warn) and text of the checks for which a run has metrics."""


@dataclass(frozen=True)
class HealthCheck:
    """One property of a run."""

    name: str
    verdict: Verdict
    text: str


def check_health(run: RunFiles) -> list[HealthCheck]:
    """The checks for which the run has metrics, failures first."""
    order: tuple[Verdict, ...] = ("bad", "warn", "good")
    checks = [
        HealthCheck(name, verdict if isinstance(verdict, str) else "warn" if verdict else "good", text)
        for name, verdict, text in chain(
            _outcome(run), _rewards(run), _mismatch(run), _policy(run), _engines(run)
        )
    ]
    return sorted(checks, key=lambda check: order.index(check.verdict))


def _outcome(run: RunFiles) -> Checks:
    planned = f" of {run.planned}" if run.planned else ""
    state = "running," if run.running else "not finished: ended at"
    text = f"finished, {run.steps} steps" if run.finished else f"{state} step {run.steps}{planned}"
    yield "end", not (run.finished or run.running), text
    odd = [(int(row["step"]), key) for row in run.rows for key in row if not math.isfinite(row[key])]
    if odd:
        names = ", ".join(name for name, _ in Counter(key for _, key in odd).most_common(3))
        yield "numbers", "bad", f"NaN or infinite from step {odd[0][0]} on: {names}"
    elif run.rows:
        yield "numbers", "good", "all finite"
    losses = run.series("sft/heldout_loss")
    if len(losses) > 1:
        (_, first), (_, last), (best, least) = losses[0], losses[-1], min(losses, key=_value)
        text, overfits = f"{first:.4g} before, {last:.4g} after", last > _OVERFITTED * least
        if overfits:
            text += f"; least {least:.4g}, at step {best}: later steps overfit (fewer sft.epochs, more data)"
        yield "held-out loss", overfits or last >= first, text


def _rewards(run: RunFiles) -> Checks:
    keys = sorted({key for row in run.rows for key in row})
    points = [(v, step, key) for key in keys if key.endswith("/failed_frac") for step, v in run.series(key)]
    failed = {step for value, step, _ in points if value > 0}
    if failed:
        worst, step, key = max(points)
        where = "responses" if key.startswith("reward/") else f"responses of {key.split('/')[1]}"
        text = f"the reward failed in {_times(len(failed), 'step')}, on up to {worst:.1%} of the {where}"
        yield "rewards", "bad" if worst >= REWARD_FAILURES_SHARE else "warn", f"{text} (step {step})"
    elif points:
        yield "rewards", "good", "the reward failed on no response"
    for tool in (key.removesuffix("_raised") for key in keys if key.endswith("_raised")):
        calls, errors, raised = (
            sum(value for _, value in run.series(f"{tool}_{kind}")) for kind in ("calls", "errors", "raised")
        )
        if calls:
            text = f"{tool.removeprefix('env/')}: {errors / calls:.1%} of the calls failed"
            if raised:
                text += f"; {raised / calls:.1%} by exceptions of the tool (logs/sampler.log has the first)"
            yield "tools", raised > 0.01 * calls or errors > 0.9 * calls, text
    if truncated := run.series("response/truncated_frac"):
        text = f"{_last(truncated):.1%} of the last responses were truncated"
        if whole := [step for step, value in truncated if value == 1]:
            text += f"; all responses in {_times(len(whole), 'step')} ({_first(whole)})"
        yield "length", bool(whole) or _last(truncated) > _TRUNCATED, text
    equal, silent = _equal_groups(run), _silent_steps(run)
    if _learns_from_rewards(run) and (equal or run.series("reward/std")):
        remarks = [f"{_last(equal):.0%} of the last groups had equal rewards"] if equal else []
        if silent:
            steps = f"{_times(len(silent), 'step')} ({_first(silent)})"
            remarks.append(f"no signal in {steps}: all rewards were equal")
        warn = bool(silent or (equal and _last(equal) > _SILENT))
        yield "signal", warn, "; ".join(remarks) or "rewards differ"


def _learns_from_rewards(run: RunFiles) -> bool:
    """Distillation may train on any rewards, or none."""
    return run.config.get("objective.type") != "distil" or bool(run.config.get("objective.reward"))


def _equal_groups(run: RunFiles) -> list[tuple[int, float]]:
    """The share of groups of equal rewards by step, if such a group has no learning signal."""
    kind = run.config.get("advantage.type", "rpg")
    compares = kind in ("rpg", "grpo", "leave_one_out") and run.config.get("rollout.samples_per_prompt") != 1
    return run.series("groups/equal_rewards") if compares else []


def _silent_steps(run: RunFiles) -> list[int]:
    """Steps in which all rewards of each group, or of the batch, were equal: all advantages are 0."""
    silent = {step for step, value in run.series("reward/std") if value == 0}
    silent |= {step for step, value in _equal_groups(run) if value == 1}
    return sorted(silent) if _learns_from_rewards(run) else []


def _mismatch(run: RunFiles) -> Checks:
    largest, engines = run.series("mismatch/logp_max"), run.series("mismatch/logp_engine_mean")
    means = run.series("mismatch/logp_mean") + engines
    if not largest or not means:
        return
    dtype, guards = str(run.config.get("precision.dtype", "bfloat16")), _read_guards(run)
    bounds = guards.thresholds(dtype)
    (_, worst), (step, average) = max(largest, key=_value), max(means, key=_value)
    bound = "" if math.isinf(bounds[0]) else f" (bound {bounds[0]:.2g})"
    text = f"mean {average:.2g} (bound {bounds[1]:.2g}), max {worst:.2g}{bound} nats"
    ratios = dict(run.series("mismatch/logp_engine_ratio"))
    differ = [
        (s, ratios[s]) for s, v in engines if s in ratios and guards.engine_differs(v, ratios[s], dtype)
    ]
    if over := worst > bounds[0] or average > bounds[1]:
        text += f"; worst at step {step}"
    elif differ:
        at, ratio = max(differ, key=_value)
        text += f"; at step {at} the mismatch of one engine is {ratio:.0f} times that of the others"
    yield "mismatch", "bad" if over or differ else "good", text


def _read_guards(run: RunFiles) -> GuardSettings:
    """The run's guards; the default ones if they cannot be read."""
    known = {k: f"guards.{k}" for k in GuardSettings.model_fields}
    try:
        return GuardSettings.model_validate({k: run.config[v] for k, v in known.items() if v in run.config})
    except ValidationError:
        return GuardSettings.model_validate({})


def _policy(run: RunFiles) -> Checks:
    skipped = run.series("policy/skipped_updates")
    if skipped:
        steps, total = [step for step, value in skipped if value > 0], int(sum(value for _, value in skipped))
        text = f"{_times(total, 'update')} skipped (step {_first(steps)}): the gradient was not finite"
        yield "updates", bool(steps), text if steps else "none skipped"
    entropy = [value for _, value in run.series("policy/entropy")]
    if len(entropy) > 1:
        first, last = map(fmean, run_ends(entropy))
        remark = ": grows" if last > max(3 * first, 1) else ": collapsed" if last < _ENTROPY * first else ""
        yield "entropy", bool(remark), f"{first:.3g} → {last:.3g} nats per token{remark}"
    # Without steps where all rewards are equal: their gradient is that of the KL only, and much smaller.
    silent = set(_silent_steps(run))
    if norms := [(step, value) for step, value in run.series("policy/grad_norm") if step not in silent]:
        middle = median(value for _, value in norms)
        text = f"median norm {middle:.3g}, largest {max(norms, key=_value)[1]:.3g}"
        if spikes := [step for step, value in norms if value > _SPIKE * middle]:
            times = _times(len(spikes), "spike")
            text += f"; {times} over {_SPIKE:.0f} times the median (step {_first(spikes)})"
        yield "gradient", bool(spikes), text
    sides = [run.series(f"policy/clip_frac_{side}") for side in ("high", "low", "c")]
    if all(sides):
        clipped = list(map(_last, sides))
        yield "clipping", max(clipped) > _CLIPPED, f"{sum(clipped):.2%} of the tokens in the last steps"


def _engines(run: RunFiles) -> Checks:
    if not any("engine/restarts" in row for row in run.rows):
        return
    restarts = int(sum(value for _, value in run.series("engine/restarts")))
    try:  # an engine may have been started once more with another model runner (``launcher.engines``)
        log = read_text(run.folder / LOGS / LAUNCHER_LOG, run.folder)
    except (OSError, ValueError):
        log = ""
    text, fell_back = _times(restarts, "restart"), f"({RUNNER_VARIABLE}=0)" in log
    if fell_back:
        text += "; with vLLM's model runner V1, because V2 did not start: see logs/launcher.log"
    yield "engines", bool(restarts) or fell_back, text


def _last(series: Sequence[tuple[int, float]]) -> float:
    return fmean(value for _, value in run_ends(series)[1])


def _first(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:3])) + (", …" if len(steps) > 3 else "")


def _times(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"

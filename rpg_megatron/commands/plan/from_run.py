"""``plan --from RUN``: what the formulas say of other settings, scaled by what a run measured.

Each phase has one factor, the run's seconds over those of the formula for the run's own settings, layout and
lengths. What a run measured: lengths, kept groups and seconds of each phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import get_args

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.plan.gpus import Assumptions, percentile
from rpg_megatron.commands.plan.plan import Plan, plan_for, told
from rpg_megatron.commands.plan.step_time import Name, estimate_step
from rpg_megatron.commands.report.run_files import read_run
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.affects import settings_that_differ
from rpg_megatron.config.base import What
from rpg_megatron.launcher.run_dir import CONFIG
from rpg_megatron.system.metrics_file import METRICS, Row

_LATEST = 50
"""Steps that are read, the newest: older ones have other lengths, or settings that a resume changed."""
_PHASES = {"logprobs": "log-probs", "update": "update", "sync": "sync", "handover": "handover"}
"""Time in the metrics -> phase of ``plan``."""
_NEEDED = ("time/step", "time/collect", "time/update", "step/tokens", "response/length_mean")
_FEW = 5
"""Steps below which a median is called one of few."""
_SET_BY: dict[str, str] = {"log-probs": "score_mfu", "update": "train_mfu", "rollout": "decode_efficiency"}
"""Phase -> the assumption with which ``--assume`` sets its speed, in place of the run's."""


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the newest steps of a run, without the first one.

    steps: that were read; warm: the first one was left out, since there are others; prompt, response: mean
    tokens, those of a prompt with all else that was not sampled; long: 90th percentile of responses, by the
    95th and the mean; kept: fraction of groups that ``rollout.dynamic`` kept; seconds: of the phases
    of ``plan`` that happened (rollout with its tail, log-probs, update, sync, handover, other).
    """

    folder: Path
    settings: Settings
    steps: int
    warm: bool
    running: bool
    prompt: float
    response: float
    long: float | None
    kept: float | None
    seconds: dict[str, float]
    step: float


@dataclass(frozen=True)
class FromRun:
    """What a plan took from a run.

    assumed: the assumptions with what the run says, unless the user has set them; timed: whether the run's
    times are among it; notes: what was not taken and why, what differs between the run and the settings.
    """

    run: MeasuredRun
    assumed: Assumptions
    timed: bool
    notes: tuple[str, ...]


def take_from(folder: Path, plan: Plan, assumed: Assumptions) -> FromRun:
    """What the run in ``folder`` determines.

    Raises UserError as ``measure_run`` does, and if nothing of the run tells about the planned one: another
    device and another model, or on a CPU another model or other processes, which share its cores.
    """
    run = measure_run(folder)
    theirs, settings, target = run.settings, plan.settings, plan.target
    shape = read_model_shape(theirs.model.path)
    same_model, same_device = shape == plan.shape, theirs.device == target.device
    if not same_model and not (same_device and plan.on_gpu):
        raise UserError(
            f"--from {folder}: a run of another model ({theirs.model.path}) on device {theirs.device}: its "
            "times tell nothing about this one; give a run of the same model, or of GPUs for a plan of GPUs"
        )
    kinds = (what for what in get_args(What) if what != "files")
    before_and_after = theirs.model_dump(mode="json"), settings.model_dump(mode="json")
    changes = settings_that_differ(*before_and_after, *kinds)
    for key, (before, after) in changes.items() if same_device and not plan.on_gpu else ():
        if key.startswith("parallel.") or key in ("engine.replicas", "engine.tensor"):
            raise UserError(
                f"--from {folder}: the run has {key} {before}, this config {after}; on a CPU processes share "
                f"the cores, so the run's times do not scale with their number: plan with {key}={before}, or "
                f"give a run with {after}"
            )
    changed = "; ".join(f"{key}: {before} -> {after}" for key, (before, after) in changes.items())
    notes = tuple(_notes(run, plan, changed, same_model=same_model, same_device=same_device))
    taken = assumed.replaced(_lengths(run, settings) if same_model else {})
    if same_device:
        factors = _factors(run, plan_for(theirs, shape, target), assumed.replaced(_lengths(run, theirs)))
        taken = replace(taken.replaced({"step_overhead": run.seconds["other"]}), factors=factors)
    return FromRun(run, taken, same_device, notes)


def _lengths(run: MeasuredRun, settings: Settings) -> dict[str, float]:
    """Lengths and kept groups of the run, as fractions of the limits of ``settings``."""
    limit = settings.rollout.max_response_tokens
    values = {
        "prompt_mean": run.prompt / settings.data.max_prompt_tokens,
        "response_mean": min(1.0, run.response / limit),
    }
    if run.long is not None:
        values["response_p90"] = min(1.0, run.long / limit)
    return values if run.kept is None else {**values, "kept_groups": run.kept}


def _factors(run: MeasuredRun, of_run: Plan, assumed: Assumptions) -> dict[str, float]:
    """Phase -> measured seconds over those of the formula; a phase that has none in either is left out."""
    step, factors = estimate_step(of_run, assumed), dict[str, float]()
    phases: tuple[Name, ...] = ("rollout", "log-probs", "update", "sync", "handover")
    for name in phases:
        formula = step.generation if name == "rollout" else step.seconds(name)
        by_user = assumed.sources.get(_SET_BY.get(name, ""), "") == "as set"
        if formula > 0 and name in run.seconds and not by_user:
            factors[name] = run.seconds[name] / formula
    if step.placement == "overlapped" and "rollout" in factors:  # 1 + ahead steps hold a batch and its update
        trained = sum(seconds for name, seconds in run.seconds.items() if name != "rollout")
        factors["rollout"] = min(factors["rollout"], ((1 + step.ahead) * run.step - trained) / step.longest)
    return factors


def _notes(
    run: MeasuredRun, plan: Plan, changed: str, *, same_model: bool, same_device: bool
) -> Iterator[str]:
    """What to know of the figures: what was read, what was not taken, what differs."""
    settings, theirs, steps = plan.settings, run.settings, run.steps
    layouts = [(s.parallel, s.engine.tensor, s.engine.colocated) for s in (theirs, settings)]
    moved = same_device and plan.on_gpu and layouts[0] != layouts[1]
    longer = same_model and run.response > settings.rollout.max_response_tokens
    yield from told(
        {
            f"medians of {steps} step{'s' * (steps > 1)}: few": run.warm and steps < _FEW,
            "only its first step, which includes warm-up: its times are too long": not run.warm,
            f"another model ({theirs.model.path}): its lengths and kept groups are not used": not same_model,
            f"another device ({theirs.device}): its lengths are used, its times are not": not same_device,
            "another layout: work is divided by the GPUs at the run's speed; bubbles, reductions, and "
            "communication of tensor parallelism and experts are those of the formulas": moved,
            "the mean response is longer than rollout.max_response_tokens, so all count as that long": longer,
            f"changed settings, with the lengths of the run: {changed}": changed,
        }
    )


def measure_run(folder: Path) -> MeasuredRun:
    """Read a finished or running run.

    Raises UserError if it is not the folder of a run of reinforcement learning, its settings cannot be read,
    or it has no completed step with times.
    """
    run = read_run(folder)
    try:
        settings = with_local_model(load_settings(folder / CONFIG), weights=False)
    except UserError as e:
        raise UserError(f"--from {folder}: its settings cannot be read: {e}") from None
    if settings.sft is not None:
        raise UserError(
            f"--from {folder}: a run of fine-tuning (sft) has no rollouts; give one of train's RL"
        )
    # The first one includes warm-up; those after later starts are few, and these are medians.
    timed = [
        r for r in run.rows if all(math.isfinite(r.get(key, math.nan)) and r[key] > 0 for key in _NEEDED)
    ]
    rows = (timed[1:] or timed)[-_LATEST:]
    if not rows:
        steps = f"{run.steps} completed steps" if run.steps else "no completed step"
        hint = "; wait for its first step" if run.running else ""
        raise UserError(f"--from {folder}: {METRICS} has {steps} with times and lengths{hint}")
    response = median(row["response/length_mean"] for row in rows)
    tokens = median(row["step/tokens"] for row in rows)
    long = [row["response/length_p95"] for row in rows if "response/length_p95" in row]
    prompts = settings.rollout.prompts_per_step
    drawn = [prompts / row["sampling/generated"] for row in rows if row.get("sampling/generated")]
    phases = [_phases(row, settings) for row in rows]
    seconds = {name: median(step[name] for step in phases) for name in phases[0]}
    return MeasuredRun(
        folder=folder,
        settings=settings,
        steps=len(rows),
        warm=len(timed) > 1,
        running=run.running,
        prompt=max(1.0, tokens / settings.sequences - response),
        response=response,
        long=percentile(response, median(long)) if len(long) == len(rows) else None,
        kept=min(1.0, median(drawn)) if drawn and settings.rollout.dynamic is not None else None,
        seconds={name: value for name, value in seconds.items() if value > 0 or name == "other"},
        step=median(row["time/step"] for row in rows),
    )


def _phases(row: Row, settings: Settings) -> dict[str, float]:
    """Seconds of the phases of ``plan``. With ``rollout.ahead`` a rollout is while engines work."""
    step, collected = row["time/step"], row["time/collect"]
    rollout = step - row.get("async/sampler_held", 0.0)
    if settings.rollout.ahead == 0:
        rollout = collected = row.get("time/rollout", collected)
    seconds = {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    return {"rollout": rollout, **seconds, "other": max(0.0, step - collected - sum(seconds.values()))}

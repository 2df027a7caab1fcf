"""``plan --from RUN``: what the formulas say of other settings, scaled by what a run measured.

Each phase has one factor, the run's seconds over those of the formula for the run's own settings, layout and
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.plan.gpus import Assumed, find_gpu
from rpg_megatron.commands.plan.measured_run import MeasuredRun, changes_between, measure_run
from rpg_megatron.commands.plan.plan import Plan, plan_for, told
from rpg_megatron.commands.plan.step_time import Name, step_times
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape

_FEW = 5
"""Steps below which a median is called one of few."""
_SET_BY: dict[str, str] = {"log-probs": "score_mfu", "update": "train_mfu", "rollout": "decode_efficiency"}
"""Phase -> the assumption with which ``--assume`` sets its speed, in place of the run's."""


@dataclass(frozen=True)
class FromRun:
    """What a plan took from a run."""

    run: MeasuredRun
    values: dict[str, float]
    """Assumption -> value by the run."""
    factors: dict[str, float]
    """Phase -> seconds of the run over those of the formula; those of the rollout are also its tail's."""
    notes: tuple[str, ...]
    """What was not taken and why, and what differs between the run and the planned settings."""
    measured: dict[str, float] | None
    """Seconds of the run's phases, the rollout with its tail; None: its times are not used."""

    def applied(self, assumed: Assumed) -> Assumed:
        """These assumptions with what the run says; those that the user has set stay."""
        by_run = assumed.replaced(self.values)
        return replace(by_run, values=replace(by_run.values, factors=self.factors))


def take_from(folder: Path, plan: Plan, assumed: Assumed) -> FromRun:
    """What the run in ``folder`` determines.

    Raises UserError as ``measure_run`` does, and if nothing of the run tells about the planned one: another
    device and another model, or on a CPU another model or other processes, which share its cores.
    """
    run = measure_run(folder)
    run = replace(run, settings=with_local_model(run.settings, weights=False))
    same_model = _shape_of(run, plan) == plan.shape
    same_device = run.settings.device == plan.target.device
    if not same_model and not same_device:
        raise UserError(
            f"--from {folder}: a run of another model ({run.settings.model.path}) on another device "
            f"({run.settings.device}) tells nothing about this one; give a run of the same model or device"
        )
    if same_device and not plan.on_gpu:
        _refuse_on_cpu(run, plan.settings, same_model=same_model)
    notes = tuple(_notes(run, plan, same_model=same_model, same_device=same_device))
    values = _lengths(run, plan.settings) if same_model else {}
    if not same_device:
        return FromRun(run, values, {}, notes, None)
    of_run = plan_for(run.settings, _shape_of(run, plan), plan.target)
    factors = _factors(run, of_run, assumed.replaced(_lengths(run, run.settings)))
    return FromRun(run, {**values, "step_overhead": run.seconds["other"]}, factors, notes, run.seconds)


def _shape_of(run: MeasuredRun, plan: Plan) -> ModelShape:
    if run.settings.model.path == plan.settings.model.path:
        return plan.shape
    try:
        return read_model_shape(run.settings.model.path)
    except UserError as e:
        raise UserError(
            f"--from {run.folder}: the run's model cannot be compared with {plan.settings.model.path}: {e}"
        ) from None


def _refuse_on_cpu(run: MeasuredRun, settings: Settings, *, same_model: bool) -> None:
    """Times of CPU processes carry over only to the same ones."""
    if not same_model:
        raise UserError(
            f"--from {run.folder}: a run of another model ({run.settings.model.path}); on a CPU its times "
            "tell nothing about this one, whose products have other sizes"
        )
    for name in ("parallel", "engine"):
        for size in ("tensor", "pipeline", "context", "data", "expert", "replicas"):
            before, after = (getattr(getattr(s, name), size, None) for s in (run.settings, settings))
            if before != after:
                raise UserError(
                    f"--from {run.folder}: the run has {name}.{size} {before}, this config {after}; on a CPU "
                    "processes share the cores, so the run's times do not scale with their number: plan with "
                    f"{name}.{size}={before}, or give a run with {after}"
                )


def _lengths(run: MeasuredRun, settings: Settings) -> dict[str, float]:
    """Lengths and kept groups of the run, as fractions of the limits of ``settings``."""
    values = {
        "prompt_mean": run.prompt / settings.data.max_prompt_tokens,
        "response_mean": min(1.0, run.response / settings.rollout.max_response_tokens),
    }
    return values if run.kept is None else {**values, "kept_groups": run.kept}


def _factors(run: MeasuredRun, of_run: Plan, assumed: Assumed) -> dict[str, float]:
    """Phase -> measured seconds over those of the formula; a phase that has none in either is left out."""
    step, factors = step_times(of_run, assumed.values)[0], {}
    phases: tuple[Name, ...] = ("rollout", "log-probs", "update", "sync", "handover")
    for name in phases:
        formula = step.generation if name == "rollout" else step.seconds(name)
        by_user = assumed.sources.get(_SET_BY.get(name, ""), "") == "as set"
        if formula > 0 and name in run.seconds and not by_user:
            factors[name] = run.seconds[name] / formula
    return factors


def _notes(run: MeasuredRun, plan: Plan, *, same_model: bool, same_device: bool) -> Iterator[str]:
    """What to know of the figures: what was read, what was not taken, what differs."""
    settings, model, other = plan.settings, run.settings.model.path, _other_gpu(run, plan.target.name)
    changes = changes_between(run.settings, settings)
    layouts = [(s.parallel, s.engine.tensor, s.engine.colocated) for s in (run.settings, settings)]
    longer = same_model and run.response > settings.rollout.max_response_tokens
    yield from told(
        (not run.warm, "the run has only its first step, which includes warm-up: its times are too long"),
        (
            run.warm and run.steps < _FEW,
            f"medians of {run.steps} step{'s' if run.steps > 1 else ''}: few",
        ),
        (
            not same_model,
            f"the run's model is another ({model}): its lengths and kept groups are not used, its speed is, "
            "in proportion to the formulas",
        ),
        (
            not same_device,
            f"the run's device is {run.settings.device}: its lengths and kept groups are used, its times "
            "are not",
        ),
        (
            same_device and other,
            f"the run's GPU is another ({other}): its times are used as if they were of {plan.target.name}",
        ),
        (
            same_device and plan.on_gpu and layouts[0] != layouts[1],
            "another layout: work is divided by the GPUs at the run's speed; bubbles, reductions, and "
            "communication of tensor parallelism and experts are those of the formulas",
        ),
        (
            longer,
            "the run's mean response is longer than rollout.max_response_tokens, so all count as that long",
        ),
        (
            changes,
            f"settings that differ from the run's, whose lengths are used: {'; '.join(changes)}",
        ),
    )


def _other_gpu(run: MeasuredRun, target: str) -> str | None:
    """The name of the run's GPU if it is known not to be the target; None: the same, or unknown."""
    if run.gpu is None or find_gpu(target) is None:
        return None
    word = target.lower().split("-")[0].removesuffix("s")
    return None if word in run.gpu.lower() else run.gpu

"""``plan --from RUN``: assumptions such that the formulas give a run's own times, for other settings.

Each phase has one unknown: the fraction of the peak for log-probs and for updates, a factor for rollout, sync
and handover, seconds for the rest. It is solved with the run's own settings, layout and lengths. What the
formulas say of another batch, length or layout is then scaled by what the run measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.plan.gpus import Assumed, find_gpu
from rpg_megatron.commands.plan.measured_run import Changes, MeasuredRun, changes_between, measure_run
from rpg_megatron.commands.plan.plan import Plan, Target, plan_for
from rpg_megatron.commands.plan.step_time import Name, step_times
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape

_MOST = 1e6
"""A fraction of the peak with which FLOPs take no time."""
_FEW = 5
"""Steps below which a median is called one of few."""


@dataclass(frozen=True)
class FromRun:
    """What a plan took from a run."""

    run: MeasuredRun
    values: dict[str, float]
    """Assumption -> value by the run."""
    notes: tuple[str, ...]
    """What was not taken and why, and what differs between the run and the planned settings."""
    measured: dict[str, float] | None
    """Seconds of the run's phases, the rollout with its tail; None: its times are not used."""


def take_from(folder: Path, plan: Plan, assumed: Assumed) -> FromRun:
    """Solve the assumptions of ``assumed`` that the run in ``folder`` determines.

    Raises UserError as ``measure_run`` does, and if nothing of the run tells about the planned one: another
    device and another model, or on a CPU another model or other processes, which share its cores.
    """
    run = measure_run(folder)
    run = replace(run, settings=with_local_model(run.settings, weights=False))
    changes = changes_between(run.settings, plan.settings)
    shape = _shape_of(run, plan)
    same_model, same_device = shape == plan.shape, run.settings.device == plan.target.device
    if not same_model and not same_device:
        raise UserError(
            f"--from {folder}: a run of another model ({run.settings.model.path}) on another device "
            f"({run.settings.device}) tells nothing about this one; give a run of the same model or device"
        )
    if same_device and plan.target.device == "cpu":
        _refuse_on_cpu(run, plan.settings, same_model=same_model)
    notes = [*_notes(run, plan, changes, same_model=same_model, same_device=same_device)]
    values = _lengths(run, plan.settings) if same_model else {}
    if not same_device:
        return FromRun(run, values, tuple(notes), None)
    target = plan.target
    own = assumed.replaced(_lengths(run, run.settings))
    times = _solve(run, plan_for(run.settings, shape, target), own, notes)
    return FromRun(run, {**values, **times}, tuple(notes), run.seconds)


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
    most = settings.rollout.max_response_tokens
    values = {
        "prompt_mean": max(1.0, run.prompt) / settings.data.max_prompt_tokens,
        "response_mean": min(1.0, run.response / most),
        "response_longest": min(1.0, run.longest / most),
    }
    return values if run.kept is None else {**values, "kept_groups": run.kept}


def _solve(run: MeasuredRun, plan: Plan, assumed: Assumed, notes: list[str]) -> dict[str, float]:
    """Assumptions with which the formulas give the phases of the run."""
    values: dict[str, float] = {}
    current = assumed.values

    def computed(*phases: Name, **changed: float) -> float:
        return step_times(plan, current.replaced(changed))[0].seconds(*phases)

    def solve_mfu(name: str, phase: Name) -> None:
        """The fraction of the peak; a phase also has seconds that do not depend on it, such as links."""
        nonlocal current
        measured = run.seconds.get(phase, 0.0)
        if computed(phase, **{name: 1 / _MOST}) == computed(phase, **{name: _MOST}):
            notes.append(
                f"{phase}: the run computes none; {name} remains {getattr(current, name):g}, assumed"
            )
            return
        if measured <= computed(phase, **{name: _MOST}):
            why = "has no time for it" if measured <= 0 else "took less than the formula without its FLOPs"
            notes.append(f"{phase}: the run {why}; {name} remains {getattr(current, name):g}, assumed")
            return
        low, high = 1 / _MOST, _MOST  # seconds fall as it grows
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if computed(phase, **{name: middle}) > measured else (low, middle)
        values[name] = low
        current = current.replaced({name: low})

    def solve_factor(name: str, *phases: Name) -> None:
        nonlocal current
        measured, formula = run.seconds.get(phases[0], 0.0), computed(*phases)
        if measured > 0 and formula > 0:
            values[name] = measured / formula
            current = current.replaced({name: values[name]})

    solve_mfu("score_mfu", "log-probs")
    if plan.target.device == "cpu" and "score_mfu" in values:
        # A product is as fast in both passes there; what an update takes beyond is launches and optimizer.
        fixed = run.seconds["update"] - computed("update", train_mfu=current.score_mfu)
        if fixed > 0:
            values |= {"train_mfu": current.score_mfu, "update_overhead": fixed / plan.batch.updates}
            current = current.replaced(values)
    if "train_mfu" not in values:
        solve_mfu("train_mfu", "update")
    overlapped = run.settings.rollout.ahead and run.settings.rollout.inflight != "drain"
    solve_factor("rollout_factor", "rollout", *(() if overlapped else ("rollout: tail",)))
    solve_factor("sync_factor", "sync")
    solve_factor("handover_factor", "handover")
    values["step_overhead"] = run.seconds["other"]
    if "save" in run.seconds:
        values["save"] = run.seconds["save"]
    return values


def _notes(
    run: MeasuredRun, plan: Plan, changes: Changes, *, same_model: bool, same_device: bool
) -> Iterator[str]:
    """What to know of the figures: what was read, what was not taken, what differs."""
    settings = plan.settings
    if not run.warm:
        yield "the run has only its first step, which includes warm-up: its times are too long"
    elif run.steps < _FEW:
        yield f"medians of {run.steps} step{'s' if run.steps > 1 else ''}: few"
    if not same_model:
        yield (
            f"the run's model is another ({run.settings.model.path}): its lengths and kept groups are not "
            "used, its efficiencies are, as fractions of the peak"
        )
    if not same_device:
        yield (
            f"the run's device is {run.settings.device}: its lengths and kept groups are used, its times "
            "are not"
        )
    elif (other := _other_gpu(run, plan.target)) is not None:
        yield (
            f"the run's GPU is another ({other}): efficiencies are used as fractions of the speeds of "
            f"{plan.target.name}"
        )
    if same_device and plan.target.device == "cuda" and _layout(run.settings) != _layout(settings):
        yield (
            "another layout: work is divided by the GPUs at the run's efficiency; bubbles, reductions, and "
            "communication of tensor parallelism and experts are those of the formulas"
        )
    if same_model and run.response > settings.rollout.max_response_tokens:
        yield "the run's mean response is longer than rollout.max_response_tokens, so all count as that long"
    if changes.counted:
        yield f"changed, and computed: {'; '.join(changes.counted)}"
    if changes.lengths and same_model:
        yield f"changed, so lengths and kept groups may be others: {'; '.join(changes.lengths)}"
    if changes.unknown:
        yield f"changed, with an effect on the time that is not computed: {'; '.join(changes.unknown)}"


def _layout(settings: Settings) -> tuple[Any, ...]:
    return settings.parallel, settings.engine.tensor, settings.engine.colocated


def _other_gpu(run: MeasuredRun, target: Target) -> str | None:
    """The name of the run's GPU if it is known not to be the target; None: the same, or unknown."""
    words = target.name.lower().split("-")
    if not run.gpus or find_gpu(target.name) is None:
        return None
    name = run.gpus[0].split(",")[0].strip()
    return None if words[0].removesuffix("s") in name.lower() else name

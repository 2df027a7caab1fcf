"""The cost of a run, and a faster placement of trainer and engines on the same GPUs, if there is one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from rpg_megatron.commands.plan.gpus import Assumptions, assume
from rpg_megatron.commands.plan.layout import GPUS_PER_NODE
from rpg_megatron.commands.plan.plan import ROOM, Plan, make_plan, plan_for
from rpg_megatron.commands.plan.run_cost import RunCost, StepParts, run_cost, step_parts
from rpg_megatron.commands.plan.step_time import StepTime, step_times
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.settings import make_settings

FASTER = 0.95
"""Fraction of the time that a placement takes at most to be named; estimates are no more exact."""
_GIB = 1024**3


@dataclass(frozen=True)
class Costed:
    """A plan with the time of its step and the cost of its run."""

    plan: Plan
    step: StepTime
    parts: StepParts
    cost: RunCost | None
    """None: the run never ends, see ``run_cost``."""
    overrides: tuple[str, ...] = ()
    """The settings that differ from those of the run that was planned."""


def costed(plan: Plan, assumed: Assumptions, overrides: tuple[str, ...] = ()) -> Costed:
    """The cost of a plan."""
    step, settings = step_times(plan, assumed)[0], plan.settings
    parts, every = step_parts(step), settings.checkpoint.every
    cost = run_cost(parts, settings.training.steps, assumed, every=every, gpus=plan.gpus.total)
    return Costed(plan, step, parts, cost, overrides)


def estimate(settings: Settings) -> list[str]:
    """What ``plan`` says of the cost of a run on GPUs; empty where it has no estimate."""
    if settings.device != "cuda" or settings.sft is not None:
        return []
    try:
        plan = make_plan(settings)
    except UserError:  # plan says why
        return []
    assumed = assume(plan.target.name).values
    return list(cost_lines(costed(plan, assumed), assumed)) if plan.fits else []


def cost_lines(run: Costed, assumed: Assumptions) -> Iterator[str]:
    """A line for the cost of the run, and one if an update is longer than the warning of a job."""
    cost, settings, plan, hours = run.cost, run.plan.settings, run.plan, f"{assumed.walltime:g} h"
    if cost is None and settings.checkpoint.every is None:
        yield f"the run takes longer than a job of {hours}, and saves nothing: set checkpoint.every"
    elif cost is None:
        yield f"the run never ends: a job of {hours} is too short for a step; ask for a longer walltime"
    else:
        jobs = f"{cost.steps_per_job:.1f} in each of {cost.jobs:,} jobs" if cost.jobs > 1 else "in one job"
        left_out = "evaluations, waiting" if settings.evaluation else "waiting"
        yield (
            f"the run, {run.step.placement}: {cost.steps:,} steps of {cost.step:,.0f} s, {jobs} of {hours}: "
            f"{_price(cost)} on {plan.gpus.total:,} {plan.target.name}; computed, not measured; not counted: "
            f"{left_out} in the queue"
        )
    late = run.parts.rest + assumed.save
    if late > assumed.warning and cost is not None and cost.jobs > 1:
        needed = 60 * math.ceil(late / 60)
        yield (
            f"an update and its save take {late:,.0f} s, but a job is warned {assumed.warning:,.0f} s "
            f"before it is killed: submit with --signal=USR1@{needed + 60}, set checkpoint.grace={needed}"
        )


def faster_line(faster: Costed) -> str:
    """The faster placement, its cost and its settings."""
    aged = ", on responses of older weights" if faster.plan.settings.rollout.ahead else ""
    price = f", {_price(faster.cost)}" if faster.cost else ""
    chosen = " ".join(shlex.quote(item) for item in faster.overrides)
    return f"faster on the same GPUs: {faster.step.placement}{aged}{price}: {chosen}"


def _price(cost: RunCost) -> str:
    time = f"{cost.days:,.1f} days" if cost.days >= 2 else f"{cost.seconds / 3600:.1f} hours"
    return f"{time}, {cost.gpu_hours:,.0f} GPU-hours"


def faster_placement(run: Costed, assumed: Assumptions) -> Costed | None:
    """The fastest other placement on the same GPUs that fits and is not tight; None: none is much faster.

    One with responses of older weights, or with more tensor parallelism, whose communication is not in the
    estimate, must be as much faster than those without.
    """
    best = None
    for overrides in _candidates(run.plan):
        if "engine.colocated=true" in overrides:
            plan, overrides = _with_kv_cache(run.plan, overrides)
        else:
            plan = _changed(run.plan, overrides)
        if plan is None or not plan.fits or plan.tight or plan.gpus.total != run.plan.gpus.total:
            continue
        other = costed(plan, assumed, overrides)
        than = best or run
        if other.cost is not None and (than.cost is None or other.cost.seconds < FASTER * than.cost.seconds):
            best = other
    return best


def _candidates(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Overrides of placements, in the order of preference."""
    settings, total = plan.settings, plan.gpus.total
    parallel, engine, cluster = settings.parallel, settings.engine, settings.cluster
    if not engine.colocated:
        spread = tuple(
            f"cluster.{name}=null"
            for name in ("trainer_nodes", "engine_nodes")
            if getattr(cluster, name) is not None
        )
        ahead = ("rollout.ahead=0", "correction=null") if settings.rollout.ahead else ()
        words = [word for word in engine.arguments if not word.startswith("--gpu-memory-utilization=")]
        share = (f"engine.arguments={words}",) if len(words) < len(engine.arguments) else ()
        for tensor in (parallel.tensor, 2 * parallel.tensor):
            of_replica = parallel.world // parallel.data // parallel.tensor * tensor
            for workers in (engine.tensor, 2 * engine.tensor):
                if tensor > GPUS_PER_NODE or workers > GPUS_PER_NODE or total % of_replica or total % workers:
                    continue
                layout = _layout(plan, tensor, total // of_replica, total // workers, workers)
                for transport in ("cuda_ipc", "process_group"):
                    rest = f"bridge.transport={transport}", *spread, *share, *ahead
                    yield "engine.colocated=true", *layout, *rest
    if not settings.rollout.ahead:
        correction = () if settings.correction else ("correction={type: truncate, high: 2.0}",)
        dynamic = settings.rollout.dynamic
        at_once = ("rollout.dynamic.oversample=1.0",) if dynamic and dynamic.oversample != 1 else ()
        halves: tuple[str, ...] = ()
        if engine.colocated:
            transport = "cuda_ipc" if total <= GPUS_PER_NODE else "process_group"
            layout = _layout(plan, parallel.tensor, parallel.data // 2, engine.replicas // 2, engine.tensor)
            halves = "engine.colocated=false", *layout, f"bridge.transport={transport}"
        yield "rollout.ahead=1", *at_once, *correction, *halves


def _layout(plan: Plan, tensor: int, data: int, replicas: int, workers: int) -> tuple[str, ...]:
    parallel, engine = plan.settings.parallel, plan.settings.engine
    new = {
        "parallel.tensor": (parallel.tensor, tensor),
        "parallel.sequence": (parallel.sequence, parallel.sequence or tensor > 1),
        "parallel.data": (parallel.data, data),
        "engine.replicas": (engine.replicas, replicas),
        "engine.tensor": (engine.tensor, workers),
    }
    return tuple(f"{key}={str(value).lower()}" for key, (old, value) in new.items() if value != old)


def _with_kv_cache(plan: Plan, overrides: tuple[str, ...]) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan with the largest KV cache that leaves twice ``ROOM``, or what its engines can fill."""
    sequence = plan.engine.sequence_tokens * plan.engine.kv_bytes_per_token
    least = _changed(plan, (*overrides, f"engine.kv_cache_gib={-(-sequence // _GIB)}"))
    if least is None or least.shared_gpu is None:
        return None, overrides
    engine, room = least.engine, 2 * ROOM
    free = plan.target.nbytes - room - (least.shared_gpu.total("rollout") - engine.kv_cache)
    most = least.settings.engine.max_sequences * engine.sequence_tokens * engine.kv_bytes_per_token
    overrides = (*overrides, f"engine.kv_cache_gib={max(1, min(free, most) // _GIB)}")
    return _changed(plan, overrides), overrides


def _changed(plan: Plan, overrides: tuple[str, ...]) -> Plan | None:
    """The plan with other settings; None: they are refused."""
    try:
        settings = make_settings(plan.settings.model_dump(), [*overrides], "plan")
        return plan_for(settings, plan.shape, plan.target)
    except UserError:
        return None

"""``rpg-megatron plan``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.plan import tables
from rpg_megatron.commands.plan.from_run import take_from
from rpg_megatron.commands.plan.gpus import Assumptions, assume, check_name
from rpg_megatron.commands.plan.plan import Plan, Target, lighter, plan_for, smallest, smallest_engine
from rpg_megatron.commands.plan.plan import sweep as layouts
from rpg_megatron.commands.plan.step_time import estimate_step
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.launcher.checks import has_weights, needs_of_images, not_checked, preparing, run_checks


def run_plan(
    settings: Settings,
    target: Target,
    *,
    sweep: bool,
    as_json: bool,
    assumptions: Sequence[str] = (),
    solve: str | None = None,
    from_run: Path | None = None,
) -> bool:
    """Print the plan of a run; returns whether it fits.

    assumptions: see ``assume``. solve: see ``solved``. from_run: folder of a run whose figures replace
    assumptions. Raises UserError as these functions and ``take_from`` do, and if a check fails: all but those
    of the machine are run.
    """
    assumed = assume(target.name, assumptions)
    if assumptions and target.device == "cpu" and from_run is None:
        raise UserError(
            "--assume: without a run (--from) time is estimated for GPUs only; choose one, such as "
            "--gpu h100-80"
        )
    if from_run is not None and settings.sft is not None:
        raise UserError("--from: fine-tuning (sft) has no estimate of time")
    for_target = with_local_model(settings.model_copy(update={"device": target.device}), hub=False)
    settings = with_local_model(for_target, weights=False)
    subject = preparing(settings, weights=settings is for_target and has_weights(settings.model.path))
    notes = [*run_checks(subject, told=True), *not_checked(subject), *needs_of_images(settings)]
    plan = plan_for(settings, read_model_shape(settings.model.path), target)
    taken = None if from_run is None else take_from(from_run, plan, assumed)
    assumed = assumed if taken is None else taken.assumed
    assumed = assumed if solve is None else solved(plan, assumed, solve)
    timed = plan.fits and settings.sft is None  # phases of RL only
    timed = timed and (plan.on_gpu or (taken is not None and taken.timed))
    refused: Counter[str] = Counter()
    answer = tables.Answer(
        plan,
        [*plan.warnings, *notes],
        assumed,
        step=estimate_step(plan, assumed) if timed else None,
        taken=taken,
        lighter=lighter(plan) if plan.fits else None,
        layout=None if plan.fits else smallest(plan),
        engine=None if plan.fits else smallest_engine(plan),
        swept=layouts(plan, settings.parallel.world, refused) if sweep else None,
        refused=refused,
    )
    if as_json:
        print(tables.to_json(answer))
    else:
        tables.print_answer(answer, table_console())
    return plan.fits


def solved(plan: Plan, assumed: Assumptions, text: str) -> Assumptions:
    """The assumptions with the value of one for which a phase takes so many seconds.

    text: ``NAME=PHASE:SECONDS``; phase: of ``StepTime``, the rollout with its tail, or step. Raises UserError
    if this is something else, or if no value gives the seconds.
    """
    name, _, known = text.partition("=")
    phase, _, number = known.rpartition(":")
    listed = "step, rollout, log-probs, update, sync"
    try:
        wanted = float(number)
    except ValueError:
        wanted = 0.0
    if phase not in listed.split(", ") or not 0 < wanted < math.inf:
        raise UserError(
            f"--solve {text}: must be NAME=PHASE:SECONDS, such as response_mean=rollout:240; phases: {listed}"
        )
    name = check_name("--solve", name)
    if not plan.on_gpu or plan.settings.sft is not None or assumed.sources[name] == "as set":
        raise UserError(
            f"--solve {name}: needs a plan of RL on GPUs, without --assume {name}; remove one of them"
        )

    def seconds(value: float) -> float:
        step = estimate_step(plan, assumed.replaced({name: value}))
        both = ("rollout", "rollout: tail") if phase == "rollout" else (phase,)
        return step.step if phase == "step" else step.seconds(*both)

    low, high = assumed.range_of(name)
    ends = sorted((seconds(low), seconds(high)))
    if not ends[0] <= wanted <= ends[1]:
        raise UserError(f"--solve {text}: with any {name}, {phase} takes {ends[0]:.3g} to {ends[1]:.3g} s")
    rises = seconds(high) > seconds(low)
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (seconds(middle) < wanted) == rises else (low, middle)
    return assumed.replaced({name: math.sqrt(low * high)}, "solved")

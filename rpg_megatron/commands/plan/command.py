"""``rpg-megatron plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.plan import tables
from rpg_megatron.commands.plan.from_run import take_from
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import find_target, lighter, make_plan, smallest, smallest_engine
from rpg_megatron.commands.plan.plan import sweep as layouts
from rpg_megatron.commands.plan.step_time import estimate_step
from rpg_megatron.config import Settings, UserError
from rpg_megatron.launcher.checks import has_weights, not_checked, preparing, run_checks


def run_plan(
    settings: Settings,
    gpu: str | None,
    *,
    sweep: bool,
    as_json: bool,
    assumptions: Sequence[str] = (),
    from_run: Path | None = None,
) -> bool:
    """Print the plan of a run; returns whether it fits.

    gpu: see ``gpu_bytes``; None: the settings' device. assumptions: see ``assume``. from_run: folder of a
    run whose figures replace assumptions.
    Raises UserError as ``assume`` and ``take_from`` do, and if a check fails: all but those of the machine
    are run.
    """
    target = find_target(settings, gpu)
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
    notes = [*run_checks(subject, told=True), *not_checked(subject)]
    plan = make_plan(settings, gpu)
    taken = None if from_run is None else take_from(from_run, plan, assumed)
    assumed = assumed if taken is None else taken.assumed
    timed = plan.fits and settings.sft is None  # phases of RL only
    timed = timed and (plan.on_gpu or (taken is not None and taken.timed))
    answer = tables.Answer(
        plan,
        [*plan.warnings, *notes],
        assumed,
        step=estimate_step(plan, assumed) if timed else None,
        taken=taken,
        lighter=lighter(plan) if plan.fits else None,
        layout=None if plan.fits else smallest(plan),
        engine=None if plan.fits else smallest_engine(plan),
        swept=layouts(plan, settings.parallel.world) if sweep else None,
    )
    if as_json:
        print(tables.to_json(answer))
    else:
        tables.print_answer(answer, table_console())
    return plan.fits

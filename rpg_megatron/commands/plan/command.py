"""``rpg-megatron plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.plan import tables
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.other_placements import costed, faster_placement
from rpg_megatron.commands.plan.plan import find_target, make_plan, smallest, smallest_engine
from rpg_megatron.commands.plan.plan import lighter as find_lighter
from rpg_megatron.commands.plan.plan import sweep as sweep_layouts
from rpg_megatron.commands.plan.step_time import step_times
from rpg_megatron.config import Settings, UserError
from rpg_megatron.launcher.checks import has_weights, not_checked, preparing, run_checks


def run_plan(
    settings: Settings, gpu: str | None, *, sweep: bool, as_json: bool, assumptions: Sequence[str] = ()
) -> bool:
    """Print the plan of a run; returns whether it fits.

    gpu: see ``gpu_bytes``; None: the settings' device. assumptions: see ``assume``.
    Raises UserError as ``assume`` does, and if a check fails: all but those of the machine are run.
    """
    target = find_target(settings, gpu)
    assumed = assume(target.name, assumptions)
    if assumptions and target.device == "cpu":
        raise UserError("--assume: time is estimated for GPUs only; choose one, such as --gpu h100-80")
    for_target = settings.model_copy(update={"device": target.device})
    settings = with_local_model(for_target, weights=False)
    subject = preparing(settings, weights=settings is for_target and has_weights(settings.model.path))
    notes = [*run_checks(subject), *not_checked(subject)]
    plan = make_plan(settings, gpu)
    timed = plan.fits and plan.on_gpu and settings.sft is None  # phases of RL only
    run = costed(plan, assumed.values) if timed else None
    answer = tables.Answer(
        plan,
        [*plan.warnings, *notes],
        assumed,
        steps=step_times(plan, assumed.values) if timed else None,
        run=run,
        faster=faster_placement(run, assumed.values) if run else None,
        lighter=find_lighter(settings, plan.shape, target) if plan.fits else None,
        layout=None if plan.fits else smallest(settings, plan.shape, target),
        engine=None if plan.fits else smallest_engine(settings, plan.shape, target),
        swept=sweep_layouts(settings, plan.shape, target, settings.parallel.world) if sweep else None,
    )
    if as_json:
        print(tables.to_json(answer))
    else:
        tables.print_answer(answer, table_console())
    return plan.fits

"""``rpg-megatron plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.plan import table
from rpg_megatron.commands.plan.assumptions import assume
from rpg_megatron.commands.plan.plan import find_target, make_plan
from rpg_megatron.commands.plan.step_table import describe_times, print_times
from rpg_megatron.commands.plan.step_time import step_times
from rpg_megatron.commands.plan.sweep import lighter as find_lighter
from rpg_megatron.commands.plan.sweep import smallest, smallest_engine
from rpg_megatron.commands.plan.sweep import sweep as sweep_layouts
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
    given = settings.model_copy(update={"device": target.device})
    settings = with_local_model(given, weights=False)
    subject = preparing(settings, weights=settings is given and has_weights(settings.model.path))
    notes = [*run_checks(subject), *not_checked(subject)]
    plan = make_plan(settings, gpu)
    plan = replace(plan, warnings=(*plan.warnings, *notes))
    swept = sweep_layouts(settings, plan.shape, target, settings.parallel.world) if sweep else None
    layout = engine = None
    if not plan.fits:
        layout = smallest(settings, plan.shape, target)
        engine = smallest_engine(settings, plan.shape, target)
    lighter = find_lighter(settings, plan.shape, target) if plan.fits else None
    times = step_times(plan, assumed.values) if plan.fits and target.device == "cuda" else None
    if as_json:
        described = describe_times(times, assumed) if times else None
        print(
            table.to_json(plan, layout=layout, engine=engine, sweep=swept, lighter=lighter, times=described)
        )
        return plan.fits
    console = table_console()
    table.print_plan(plan, console)
    if times:
        print_times(times, assumed, console)
    table.print_verdict(plan, console, lighter)
    if not plan.fits:
        table.print_suggestion(layout, engine, plan, console)
    if swept is not None:
        table.print_sweep(swept, console)
    return plan.fits

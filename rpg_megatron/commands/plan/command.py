"""``rpg-megatron plan``."""

from __future__ import annotations

from dataclasses import replace

from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.plan import table
from rpg_megatron.commands.plan.plan import find_target, make_plan
from rpg_megatron.commands.plan.sweep import lighter as find_lighter
from rpg_megatron.commands.plan.sweep import smallest, smallest_engine
from rpg_megatron.commands.plan.sweep import sweep as sweep_layouts
from rpg_megatron.config import Settings
from rpg_megatron.launcher.input_checks import list_problems


def run_plan(settings: Settings, gpu: str | None, *, sweep: bool, as_json: bool) -> bool:
    """Print the plan of a run; returns whether it fits. gpu: see ``card_bytes``.

    Raises UserError as ``make_plan`` does.
    """
    target = find_target(settings, gpu)
    plan = make_plan(settings, gpu)
    plan = replace(plan, warnings=(*plan.warnings, *list_problems(settings, plan.shape)))
    swept = sweep_layouts(settings, plan.shape, target, settings.parallel.world) if sweep else None
    layout = engine = None
    if not plan.fits:
        layout = smallest(settings, plan.shape, target)
        engine = smallest_engine(settings, plan.shape, target)
    lighter = find_lighter(settings, plan.shape, target) if plan.fits else None
    if as_json:
        print(table.to_json(plan, layout=layout, engine=engine, sweep=swept, lighter=lighter))
        return plan.fits
    console = table_console()
    table.print_plan(plan, console, lighter)
    if not plan.fits:
        table.print_suggestion(layout, engine, plan, console)
    if swept is not None:
        table.print_sweep(swept, console)
    return plan.fits

"""``rpg-megatron plan``."""

from __future__ import annotations

from rich.console import Console

from rpg_megatron.config import Settings
from rpg_megatron.launch.plan import layouts, report
from rpg_megatron.launch.plan.plan import find_target, make_plan


def run_plan(settings: Settings, gpu: str | None, *, sweep: bool, as_json: bool) -> bool:
    """Print the plan of a run; says whether it fits. gpu: see ``card_bytes``.

    Raises UserError as ``make_plan`` does.
    """
    target = find_target(settings, gpu)
    plan = make_plan(settings, gpu)
    swept = layouts.sweep(settings, plan.shape, target, settings.parallel.world) if sweep else None
    layout = engine = None
    if not plan.fits:
        layout = layouts.smallest(settings, plan.shape, target)
        engine = layouts.smallest_engine(settings, plan.shape, target)
    if as_json:
        print(report.to_json(plan, layout=layout, engine=engine, sweep=swept))
        return plan.fits
    console = Console()
    report.print_plan(plan, console)
    if not plan.fits:
        report.print_suggestion(layout, engine, plan, console)
    if swept is not None:
        report.print_sweep(swept, console)
    return plan.fits

"""Estimates of a step's time as tables and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rpg_megatron.commands.plan.assumptions import Assumed
from rpg_megatron.commands.plan.step_time import StepTime


def print_times(steps: Sequence[StepTime], assumed: Assumed, console: Console) -> None:
    """Print the phases of the first step, all placements, and the assumptions."""
    own = steps[0]
    table = _table(f"time of a step, {own.placement}: computed, not measured")
    for name in ("phase", "seconds", "share", "bound by"):
        table.add_column(name, justify="right" if name in ("seconds", "share") else "left")
    for phase in own.phases:
        table.add_row(phase.name, f"{phase.seconds:.1f}", f"{phase.seconds / own.step:.0%}", phase.bound)
    table.add_section()
    table.add_row(
        "[bold]step[/]", f"[bold]{own.step:.1f}[/]", "", f"{own.tokens / own.step:,.0f} trained tokens/s"
    )
    console.print(table)
    table = _table("placements with the same number of GPUs")
    table.add_column("placement")
    for name in ("GPUs", "step, s", "tokens/s", "trainers idle", "engines idle"):
        table.add_column(name, justify="right")
    for step in steps:
        shared = step.placement == "colocated"
        table.add_row(
            step.placement,
            f"{step.gpus:.0f}" if shared else f"{step.trainer_gpus:.0f} + {step.engine_gpus:.0f}",
            f"{step.step:.1f}",
            f"{step.tokens / step.step:,.0f}",
            f"{step.trainer_idle:.0%}",
            "the same" if shared else f"{step.engine_idle:.0%}",
        )
    console.print(table)
    console.print("by turns, overlapped: trainers and engines on separate GPUs", highlight=False)
    console.print("overlapped: rollout.ahead 1 or more; by turns: rollout.ahead 0", highlight=False)
    console.print(waits(own), highlight=False)
    table = _table("assumptions; change with --assume NAME=VALUE")
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
    table.add_column("what")
    for name, value, source, why in assumed.rows:
        table.add_row(name, _number(value), source, why)
    console.print(table)


def waits(step: StepTime) -> str:
    """One line: waiting times of trainer and engines in a step with the settings' placement."""
    rest = step.seconds("other")
    if step.placement == "colocated":
        tail, handover = step.seconds("rollout: tail"), step.seconds("handover")
        return (
            f"waiting, of {step.step:.0f} s: all GPUs {rest + handover:.0f} s for handovers and fixed costs; "
            f"in the rollout's tail of {tail:.0f} s most are idle"
        )
    trainer = step.step - step.training - step.seconds("sync")
    engines = step.step - step.generation - step.seconds("sync")
    line = (
        f"waiting, of {step.step:.0f} s: {step.trainer_gpus:.0f} trainer GPUs {trainer:.0f} s, "
        f"{step.engine_gpus:.0f} engine GPUs {engines:.0f} s"
    )
    if step.placement == "by turns":
        return f"{line}; rollout.ahead overlaps them"
    return f"{line}; generation {step.generation:.0f} s beside training {step.training:.0f} s"


def describe_times(steps: Sequence[StepTime], assumed: Assumed) -> dict[str, Any]:
    """The same for JSON: seconds, tokens, shares; the first placement is that of the settings."""
    return {
        "measured": False,
        "placements": [
            {
                "placement": step.placement,
                "trainer_gpus": step.trainer_gpus,
                "engine_gpus": step.engine_gpus,
                "phases": [vars(phase) for phase in step.phases],
                "step_seconds": step.step,
                "trained_tokens": step.tokens,
                "tokens_per_second": step.tokens / step.step,
                "generation_seconds": step.generation,
                "training_seconds": step.training,
                "trainer_idle": step.trainer_idle,
                "engine_idle": step.engine_idle,
            }
            for step in steps
        ],
        "assumptions": {name: {"value": value, "source": source} for name, value, source, _ in assumed.rows},
    }


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")


def _number(value: float) -> str:
    for exponent in (12, 9, 6):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.4g}e{exponent}"
    return f"{value:g}"

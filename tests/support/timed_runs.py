"""Folders of runs whose steps take given times, by training's own writers, and what ``plan`` makes of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpg_megatron.commands.plan.from_run import take_from
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.commands.plan.step_time import estimate_step
from rpg_megatron.config import Settings
from rpg_megatron.launcher.environment import record_environment
from rpg_megatron.launcher.run_dir import create_run
from rpg_megatron.training.metrics import MetricsWriter


def make_timed_run(
    settings: Settings,
    times: dict[str, float],
    *,
    steps: int = 6,
    prompt: float = 20.0,
    response: float = 30.0,
    longest: float = 50.0,
    more: dict[str, float] | None = None,
) -> Path:
    """A run with these ``time/*`` in all steps but the first, which takes ten times as long.

    prompt, response, longest: tokens. more: other metrics of all steps.
    """
    folder = create_run(settings)
    record_environment(folder, settings)
    writer, clock = MetricsWriter(folder), 1.7e9
    writer.write({"step": 0.0, "time/unix": clock})
    for step in range(1, steps + 1):
        seconds = {f"time/{name}": value * (10 if step == 1 else 1) for name, value in times.items()}
        clock += seconds["time/step"]
        lengths = {
            "step/tokens": settings.sequences * (prompt + response),
            "response/length_mean": response,
            "response/length_max": longest,
        }
        writer.write({"step": step, **lengths, **seconds, "time/unix": clock, **(more or {})})
    writer.close()
    return folder


def check_plan_from(run: Path, settings: Settings, seconds: float) -> None:
    """``plan --from`` reads a run of two steps; for its settings it predicts the second, of ``seconds``."""
    plan = make_plan(settings)
    assumed = assume(plan.target.name)
    taken = take_from(run, plan, assumed)
    step = estimate_step(plan, taken.assumed)
    assert (taken.run.steps, taken.run.step) == (1, seconds)
    assert step.step == pytest.approx(seconds, rel=0.02)

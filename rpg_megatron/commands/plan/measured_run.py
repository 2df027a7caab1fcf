"""What a run measured, for ``plan --from``: lengths, kept groups and seconds of each phase."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rpg_megatron.commands.report.run_files import read_run
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.launcher.run_dir import CONFIG
from rpg_megatron.system.metrics_file import METRICS, Row

_LATEST = 50
"""Steps that are read, the newest: older ones have other lengths, or settings that a resume changed."""
_PHASES = {"logprobs": "log-probs", "update": "update", "sync": "sync", "handover": "handover"}
"""Time in the metrics -> phase of ``plan``."""
_NEEDED = ("time/step", "time/collect", "time/update", "step/tokens", "response/length_mean")


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the newest steps of a run, without the first one.

    steps: that were read; warm: the first one was left out, since there are others; prompt, response: mean
    tokens, those of a prompt with all else that was not sampled; kept: fraction of groups that
    ``rollout.dynamic`` kept; seconds: of the phases of ``plan`` that happened (rollout with its tail,
    log-probs, update, sync, handover, other).
    """

    folder: Path
    settings: Settings
    steps: int
    warm: bool
    running: bool
    prompt: float
    response: float
    kept: float | None
    seconds: dict[str, float]
    step: float


def measure_run(folder: Path) -> MeasuredRun:
    """Read a finished or running run.

    Raises UserError if it is not the folder of a run of reinforcement learning, its settings cannot be read,
    or it has no completed step with times.
    """
    run = read_run(folder)
    try:
        settings = load_settings(folder / CONFIG)
    except UserError as e:
        raise UserError(f"--from {folder}: its settings cannot be read: {e}") from None
    if settings.sft is not None:
        raise UserError(
            f"--from {folder}: a run of fine-tuning (sft) has no rollouts; give one of train's RL"
        )
    # The first one includes warm-up; those after later starts are few, and these are medians.
    timed = [
        r for r in run.rows if all(math.isfinite(r.get(key, math.nan)) and r[key] > 0 for key in _NEEDED)
    ]
    rows = (timed[1:] or timed)[-_LATEST:]
    if not rows:
        steps = f"{run.steps} completed steps" if run.steps else "no completed step"
        hint = "; wait for its first step" if run.running else ""
        raise UserError(f"--from {folder}: {METRICS} has {steps} with times and lengths{hint}")
    response = median(row["response/length_mean"] for row in rows)
    tokens = median(row["step/tokens"] for row in rows)
    prompts = settings.rollout.prompts_per_step
    drawn = [prompts / row["sampling/generated"] for row in rows if row.get("sampling/generated")]
    phases = [_phases(row, settings) for row in rows]
    seconds = {name: median(step[name] for step in phases) for name in phases[0]}
    return MeasuredRun(
        folder=folder,
        settings=settings,
        steps=len(rows),
        warm=len(timed) > 1,
        running=run.running,
        prompt=max(1.0, tokens / settings.sequences - response),
        response=response,
        kept=min(1.0, median(drawn)) if drawn and settings.rollout.dynamic is not None else None,
        seconds={name: value for name, value in seconds.items() if value > 0 or name == "other"},
        step=median(row["time/step"] for row in rows),
    )


def _phases(row: Row, settings: Settings) -> dict[str, float]:
    """Seconds of the phases of ``plan``. With ``rollout.ahead`` a rollout is while engines work."""
    step, collected = row["time/step"], row["time/collect"]
    if settings.rollout.ahead > 0:
        rollout = step - row.get("async/sampler_held", 0.0)
    else:
        rollout = collected = row.get("time/rollout", collected)
    seconds = {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    return {"rollout": rollout, **seconds, "other": max(0.0, step - collected - sum(seconds.values()))}

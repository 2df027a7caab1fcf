"""What a run measured, for ``plan --from``: lengths, kept groups and seconds of each phase."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import get_args

from rpg_megatron.commands.report.run_files import read_run
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.affects import settings_that_differ
from rpg_megatron.config.base import What
from rpg_megatron.launcher.run_dir import CONFIG
from rpg_megatron.system.metrics_file import METRICS, Row

_LATEST = 50
"""Steps that are read, the newest: older ones have other lengths, or settings that a resume changed."""
_NEEDED = ("time/step", "time/collect", "time/update", "step/tokens", "response/length_mean")


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the newest steps of a run, without the first one after each start.

    steps: that were read; warm: the first one after a start was left out, since there are others; gpu: name
    of the first one at the last start, if known; prompt, response: mean tokens, those of a prompt with all
    else that was not sampled; kept: fraction of groups that ``rollout.dynamic`` kept; seconds: of the phases
    of ``plan`` that happened (rollout with its tail, log-probs, update, sync, handover, other).
    """

    folder: Path
    settings: Settings
    steps: int
    warm: bool
    running: bool
    gpu: str | None
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
    rows, warm = _steps(run.rows)
    if not rows:
        steps = f"{run.steps} completed steps" if run.steps else "no completed step"
        hint = "; wait for its first step" if run.running else ""
        raise UserError(f"--from {folder}: {METRICS} has {steps} with times and lengths{hint}")
    response = median(row["response/length_mean"] for row in rows)
    tokens = median(row["step/tokens"] for row in rows)
    prompts = settings.rollout.prompts_per_step
    drawn = [prompts / row["sampling/generated"] for row in rows if row.get("sampling/generated")]
    gpus = [value for key, value in (run.starts or [{}])[-1].items() if key.startswith("machine.gpus")]
    return MeasuredRun(
        folder=folder,
        settings=settings,
        steps=len(rows),
        warm=warm,
        running=run.running,
        gpu=gpus[0].split(",")[0].strip() if gpus else None,
        prompt=max(1.0, tokens / settings.sequences - response),
        response=response,
        kept=min(1.0, median(drawn)) if drawn and settings.rollout.dynamic is not None else None,
        seconds=_phases(rows, settings),
        step=median(row["time/step"] for row in rows),
    )


def _steps(rows: list[Row]) -> tuple[list[Row], bool]:
    """The newest complete steps, and whether those that follow a start are left out."""
    rows = [r for r in rows if all(math.isfinite(r.get(key, math.nan)) and r[key] > 0 for key in _NEEDED)]
    # A start: the first step, and one that began much later than the step before it ended.
    warm = [
        row
        for before, row in pairwise(rows)
        if row["step"] == before["step"] + 1 and _pause(before, row) < 30 + before["time/step"]
    ]
    return (warm or rows)[-_LATEST:], bool(warm)


def _pause(before: Row, row: Row) -> float:
    """Seconds between two steps that are not explained by what the row says of them."""
    ends = row.get("time/unix", 0.0) - before.get("time/unix", 0.0)
    known = row["time/step"] + row.get("time/evaluation", 0.0) + before.get("time/checkpoint", 0.0)
    return ends - known


def _phases(rows: list[Row], settings: Settings) -> dict[str, float]:
    """Seconds of the phases of ``plan``. With ``rollout.ahead`` a rollout is while engines work."""
    names = {"logprobs": "log-probs", "update": "update", "sync": "sync", "handover": "handover"}
    phases: dict[str, list[float]] = {name: [] for name in ("rollout", *names.values(), "other")}
    ahead = settings.rollout.ahead > 0
    for row in rows:
        collected = row["time/collect"]
        collected = collected if ahead else row.get("time/rollout", collected)
        held = row["time/step"] - row.get("async/sampler_held", 0.0)
        phases["rollout"].append(held if ahead else collected)
        for key, name in names.items():
            phases[name].append(row.get(f"time/{key}", 0.0))
        known = collected + sum(phases[name][-1] for name in names.values())
        phases["other"].append(max(0.0, row["time/step"] - known))
    medians = {name: median(seconds) for name, seconds in phases.items()}
    return {name: value for name, value in medians.items() if value > 0 or name == "other"}


def changes_between(run: Settings, planned: Settings) -> list[str]:
    """The settings that differ, as ``key: of the run -> planned``; without those of the files it writes."""
    then, now = (s.model_dump(mode="json") for s in (run, planned))
    kinds = (what for what in get_args(What) if what != "files")
    pairs = settings_that_differ(then, now, *kinds)
    return [f"{key}: {old} -> {new}" for key, (old, new) in pairs.items()]

"""What a run measured, for ``plan --from``: lengths, kept groups and seconds of each phase."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rpg_megatron.commands.report.run_files import RunFiles, read_run
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.files import flatten
from rpg_megatron.launcher.run_dir import CONFIG
from rpg_megatron.system.metrics_file import METRICS, Row

_LATEST = 50
"""Steps that are read, the newest: older ones have other lengths, or settings that a resume changed."""


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the newest steps of a run, without the first one after each start."""

    folder: Path
    settings: Settings
    steps: int
    """Steps that were read."""
    warm: bool
    """Whether the first step after a start was left out; not if the run has no other."""
    running: bool
    gpus: tuple[str, ...]
    """Names of the GPUs of the first node at the last start, if known."""
    prompt: float
    """Mean tokens of a prompt, and of everything else that a row has beside sampled tokens."""
    response: float
    """Mean sampled tokens of a response."""
    longest: float
    """Tokens of a step's longest response."""
    kept: float | None
    """Fraction of groups that ``rollout.dynamic`` kept; None: without it."""
    seconds: dict[str, float]
    """Phase of ``plan`` (rollout, log-probs, update, sync, handover, other, save) -> seconds; one that did
    not happen is missing."""
    step: float
    """Seconds of a step."""


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
    rows, warm = _steps(run)
    if not rows:
        steps = f"{run.steps} completed steps" if run.steps else "no completed step"
        hint = "; wait for its first step" if run.running else ""
        raise UserError(f"--from {folder}: {METRICS} has {steps} with times and lengths{hint}")
    response, tokens = _middle(rows, "response/length_mean"), _middle(rows, "step/tokens")
    drawn = [
        settings.rollout.prompts_per_step / r["sampling/generated"]
        for r in rows
        if r.get("sampling/generated")
    ]
    start = run.starts[-1] if run.starts else {}
    return MeasuredRun(
        folder=folder,
        settings=settings,
        steps=len(rows),
        warm=warm,
        running=run.running,
        gpus=tuple(value for key, value in start.items() if key.startswith("machine.gpus")),
        prompt=max(0.0, tokens / settings.sequences - response),
        response=response,
        longest=_middle(rows, "response/length_max"),
        kept=min(1.0, median(drawn)) if drawn and settings.rollout.dynamic is not None else None,
        seconds=_phases(rows, settings),
        step=_middle(rows, "time/step"),
    )


_NEEDED = (
    "time/step",
    "time/collect",
    "time/update",
    "step/tokens",
    "response/length_mean",
    "response/length_max",
)


def _steps(run: RunFiles) -> tuple[list[Row], bool]:
    """The newest complete steps, and whether those that follow a start are left out."""
    rows = [r for r in run.rows if all(math.isfinite(r.get(key, math.nan)) and r[key] > 0 for key in _NEEDED)]
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

    def rollout(row: Row) -> float:
        if settings.rollout.ahead:
            return row["time/step"] - row.get("async/sampler_held", 0.0)
        return row.get("time/rollout", row["time/collect"])

    def other(row: Row) -> float:
        known = sum(row.get(f"time/{name}", 0.0) for name in ("logprobs", "update", "sync", "handover"))
        sampled = row["time/collect"] if settings.rollout.ahead else rollout(row)
        return max(0.0, row["time/step"] - known - sampled)

    columns: dict[str, Callable[[Row], float]] = {
        "rollout": rollout,
        "log-probs": lambda row: row.get("time/logprobs", 0.0),
        "update": lambda row: row["time/update"],
        "sync": lambda row: row.get("time/sync", 0.0),
        "handover": lambda row: row.get("time/handover", 0.0),
        "other": other,
    }
    seconds = {name: median(map(column, rows)) for name, column in columns.items()}
    if saves := [row["time/checkpoint"] for row in rows if row.get("time/checkpoint", 0.0) > 0]:
        seconds["save"] = median(saves)
    return {name: value for name, value in seconds.items() if value > 0 or name == "other"}


def _middle(rows: list[Row], key: str) -> float:
    values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
    return median(values) if values else math.nan


# -- what differs between the run and the settings that are planned ------------------------------------------

COUNTED = (
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.ahead",
    "training.minibatches",
    "training.epochs",
    "training.old",
    "training.tokens_per_microbatch",
    "memory.",
    "parallel.",
    "engine.replicas",
    "engine.tensor",
    "engine.max_sequences",
    "engine.kv_cache_gib",
    "engine.colocated",
    "optimizer.overlap",
    "optimizer.distributed",
    "bridge.transport",
    "anchor.type",
)
"""Settings, or sections, whose effect on the time the formulas compute."""
LENGTHS = (
    "data.",
    "rollout.max_response_tokens",
    "rollout.temperature",
    "rollout.top",
    "rollout.stop",
    "model.path",
    "environment",
    "rollout.dynamic",
)
"""Those on which lengths and kept groups depend."""
_TIMELESS = (
    "name",
    "seed",
    "runs",
    "checkpoint.",
    "evaluation",
    "trackers",
    "guards.",
    "training.steps",
    "profile",
    "cluster.",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.warmup",
    "reward",
    "extends",
    "sft",
    "training.logprob_chunk",
)


@dataclass(frozen=True)
class Changes:
    """Settings that differ, as ``key: of the run -> planned``, by what the estimate makes of them."""

    counted: tuple[str, ...]
    lengths: tuple[str, ...]
    """Lengths and kept groups of the run may not be those of the planned one."""
    unknown: tuple[str, ...]
    """Their effect on the time is not computed."""


def changes_between(run: Settings, planned: Settings) -> Changes:
    """Compare all settings; those without effect on a step's time are left out."""
    before, after = (flatten(s.model_dump(mode="json")) for s in (run, planned))
    found: dict[str, list[str]] = {"counted": [], "lengths": [], "unknown": []}
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new or key.startswith(_TIMELESS):
            continue
        kind = "counted" if key.startswith(COUNTED) else "lengths" if key.startswith(LENGTHS) else "unknown"
        found[kind].append(f"{key}: {old} -> {new}")
    return Changes(**{kind: tuple(lines) for kind, lines in found.items()})

"""``rpg-megatron replay``: repeats the training of a step from its saved rollouts, without engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.run_folder import find_problems, list_steps, read_state
from rpg_megatron.commands.rank_job import run_ranks
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.affects import settings_that_differ
from rpg_megatron.config.files import read_text, real_path, remove
from rpg_megatron.data.rollout_files import has_routes, rollouts_complete, rollouts_file
from rpg_megatron.launcher.checks import ALL, CheckedRun, check_start
from rpg_megatron.launcher.resume import ORIGIN
from rpg_megatron.launcher.run_dir import CONFIG, load_run_settings, settings_file
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.metrics_file import METRICS, read_metrics

_ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2}
"""Maximum differences due to another order of summation."""


def replay(folder: Path, step: int, overrides: list[str] | None, signals: StopSignals) -> dict[str, Any]:
    """Replay a step of a run, after the steps since the newest checkpoint before it; returns the report.

    overrides: settings to change, such as the layout. Raises UserError, RunFailed or Interrupted as
    ``commands.train`` does. Leaves no files, unless a process died.
    """
    settings, request = plan_replay(folder, step, overrides)
    # It needs no engines and no data, and no tracker either.
    check_start(CheckedRun(settings.model_copy(update={"trackers": ()}), ALL - {"engines", "data"}))
    console = PlainTextConsole(stderr=True)
    made, report = run_ranks("replay", settings, signals, request, engines=False, console=console)
    remove(made, ignore_errors=True)
    return report


def plan_replay(folder: Path, step: int, overrides: list[str] | None) -> tuple[Settings, dict[str, Any]]:
    """Settings and request of a replay. Raises UserError if a file that it needs is missing."""
    if not (folder / CONFIG).is_file():
        problem = f"holds no {CONFIG}" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {problem}; give the folder of a run")
    load_run_settings(folder / CONFIG).prompts("replay")
    _check_row(folder, step)
    checkpoint = _start(folder, step)
    done = read_state(checkpoint)["step"] if checkpoint else 0
    missing = [s for s in range(done + 1, step + 1) if not rollouts_complete(rollouts_file(folder, s))]
    if missing:
        start = display_path(checkpoint) if checkpoint else "the beginning"
        listed = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise UserError(
            f"{folder}: the rollouts of step {listed} are missing ({rollouts_file(folder, missing[0])}); to "
            f"replay step {step} from {start} they are needed; choose a step after a checkpoint"
        )
    settings = load_run_settings(settings_file(folder, step), overrides)
    if settings.training.router_replay != "off":
        _check_routes(folder, range(done + 1, step + 1))
    made = {settings_file(folder, s) for s in range(done + 1, step + 1)}
    exact = all(_gives_same_bits(load_run_settings(file), settings) for file in made)
    request = {
        "run": str(folder.absolute()),
        "step": step,
        "checkpoint": checkpoint and str(checkpoint),
        "tolerance": 0.0 if exact else _ROUNDING[settings.precision.dtype],
    }
    name, runs = f"{settings.name}-replay", folder.absolute().parent
    return settings.model_copy(update={"name": name, "runs": runs}), request


def _check_row(folder: Path, step: int) -> None:
    notes: list[str] = []
    rows = read_metrics(folder / METRICS, notes)
    steps = {int(row["step"]) for row in rows if "policy/skipped_updates" in row}
    if step not in steps:
        have = (
            f"it has steps {min(steps)} to {max(steps)}" if steps else "; ".join(["it has no step", *notes])
        )
        raise UserError(f"--step {step}: {folder / METRICS} has no row of this step; {have}")


def _check_routes(folder: Path, steps: range) -> None:
    without = [step for step in steps if not has_routes(rollouts_file(folder, step))]
    if without:
        raise UserError(
            f"{rollouts_file(folder, without[0])}: has no routes (rollout.journal_routes does not include "
            "the step). The run used training.router_replay, so the replay needs the routes of steps "
            f"{steps[0]} to {steps[-1]}. Choose a step soon after a checkpoint, with routes in between, or "
            "add training.router_replay=off to use the trainer's routers, which gives different results"
        )


def _start(folder: Path, step: int) -> Path | None:
    """The newest complete checkpoint before the step; None: the initial model of the run."""
    for done, checkpoint in list_steps(folder).items():
        if done < step and not find_problems(checkpoint):
            return checkpoint.absolute()
    origin = read_text(folder / ORIGIN, real_path(folder)) if (folder / ORIGIN).exists() else ""
    if not origin:
        return None
    if problems := find_problems(Path(origin)):
        raise UserError(
            f"{folder}: started from {origin}, which is missing or damaged ({'; '.join(problems[:3])}), and "
            f"has no checkpoint of its own before step {step}; choose a later step"
        )
    return Path(origin)


def _gives_same_bits(made: Settings, replayed: Settings) -> bool:
    """Whether a step is repeated bit for bit: on a CPU, with all settings that affect a result."""
    then, now = (settings.model_dump(mode="json") for settings in (made, replayed))
    on_cpu = made.device == replayed.device == "cpu"
    return on_cpu and not settings_that_differ(then, now, "training", "sums")


def show(report: dict[str, Any]) -> str:
    """The report as text: one line per replayed step, then the differences of the last one."""
    request = report["request"]
    start = request["checkpoint"]
    lines = [f"from {display_path(Path(start)) if start else 'the initial model of the run'}"]
    for step in report["steps"]:
        gaps = {
            name: "not finite" if gap is None else f"{gap:.1e}"
            for name, gap in step["max_difference"].items()
        }
        listed = ", ".join(f"{name} {gap}" for name, gap in gaps.items())
        verdict = "bit for bit" if step["exact"] else "to rounding" if step["match"] else "DIFFERS"
        lines.append(
            f"step {step['step']}: {verdict}; largest difference: {listed} ({step['tokens']} tokens)"
        )
    for key in report["differing"]:
        pair = report["metrics"][key]
        lines.append(f"  {key}: {pair['run']} in the run, {pair['replay']} replayed")
    loss, norm = (report["metrics"].get(f"policy/{name}", {}).get("run") for name in ("loss", "grad_norm"))
    lines.append(
        f"step {report['step']}: loss {loss}, gradient norm {norm}: "
        + (
            "log-probs, loss, gradient norm and all other metrics match"
            + (" bit for bit" if report["exact"] else f" to rounding ({request['tolerance']:.0e})")
            if report["match"]
            else "the replay does not match the run"
        )
    )
    return "\n".join(lines)

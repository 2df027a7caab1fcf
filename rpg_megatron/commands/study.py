"""``rpg-megatron study``: the runs of a study as one job array or, without Slurm, one after the other."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.train import check_memory
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.study import Study, is_study, load_study
from rpg_megatron.launcher.checks import ALL, CheckedRun, Need, run_checks
from rpg_megatron.launcher.input_checks import list_custom_code
from rpg_megatron.launcher.resume import find_finished
from rpg_megatron.launcher.run_dir import list_runs
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.system.child import module_command, start_program
from rpg_megatron.system.terminal import ranges
from rpg_megatron.training.preemption import REQUEUE

_SCRIPT = Path(__file__).parents[2] / "slurm" / "train_single_node.sbatch"
"""In a checkout; an installed package has no job scripts."""


def run_study(
    file: Path,
    overrides: Sequence[str],
    *,
    script: Path | None,
    options: Sequence[str],
    local: bool,
    dry_run: bool,
) -> None:
    """Submit the runs that are not finished, or train them here: if ``local``, in a job, or without sbatch.

    script: job script; None: that for one node. options: of sbatch. Raises UserError; typer.Exit with 1 if
    runs failed, with another code if a signal stopped one.
    """
    study = load_study(file, overrides)
    unfinished = [run.number for run in study.runs if find_finished(run.settings) is None]
    local = local or "SLURM_JOB_ID" in os.environ or shutil.which("sbatch") is None
    if dry_run or local:
        _show(study)
    if not unfinished:
        typer.echo(f"all {len(study.runs)} runs are finished")
    elif local:
        if not dry_run:
            _check_runs(study, unfinished, ALL)
            _train_here(study, unfinished)
    elif numbers := sorted(set(unfinished) - _queued(study.name)):
        _submit(study, file, overrides, numbers, script or _SCRIPT, options, dry_run=dry_run)
    else:
        typer.echo("all runs that are not finished wait or run in a job")
    typer.echo(f"report: rpg-megatron report {shlex.quote(str(file))}")


def settings_of_task(file: Path, overrides: Sequence[str], task: int) -> Settings | None:
    """Settings of a task of a job array: a study's run of this number, or a config with this seed.

    None: that run of the study is finished. Raises UserError.
    """
    if not is_study(file):
        settings = load_settings(file, [*overrides])
        typer.echo(f"task {task} of an array: a run with seed {task} (CHAIN=1 makes all tasks one run)")
        return load_settings(file, [*overrides, f"seed={task}", f"name={settings.name}-s{task}"])
    runs = load_study(file, overrides).runs
    if not 1 <= task <= len(runs):
        raise UserError(f"{file}: there is no run {task}; the study has 1 to {len(runs)}")
    settings = runs[task - 1].settings
    if (folder := find_finished(settings)) is not None:
        typer.echo(f"run {task} of {len(runs)} is finished: {display_path(folder)}")
        return None
    return settings


def folders_of(file: Path) -> list[Path]:
    """The newest folder of each run of a study that has begun. Raises UserError if there is none."""
    folders = [list_runs(run.settings)[:1] for run in load_study(file).runs]
    if not any(folders):
        raise UserError(f"{file}: no run of this study has begun; start them with rpg-megatron study {file}")
    return [folder for found in folders for folder in found]


def _queued(name: str) -> set[int]:
    """Tasks of this user's jobs of this name that wait or run. Raises UserError."""
    command = ["squeue", "--noheader", "--array", f"--name={name}", "--me", "--format=%K"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        why = (getattr(e, "stderr", None) or str(e)).strip()
        raise UserError(f"squeue failed, so what is queued is unknown: {why}; try again") from None
    return {int(word) for word in done.stdout.split() if word.isdecimal()}


def _show(study: Study) -> None:
    width = max(len(run.settings.name) for run in study.runs)
    for run in study.runs:
        if (folder := find_finished(run.settings)) is not None:
            state = f"finished: {display_path(folder)}"
        else:
            state = "begun" if list_runs(run.settings) else "to do"
        typer.echo(f"{run.number:>3}  {run.settings.name:<{width}}  {state}")


def _submit(
    study: Study,
    file: Path,
    overrides: Sequence[str],
    numbers: Sequence[int],
    script: Path,
    options: Sequence[str],
    *,
    dry_run: bool,
) -> None:
    if not script.is_file():
        raise UserError(
            f"--script: {script} is not there; give one of the scripts in slurm/ of the repository"
        )
    limit = f"%{study.at_once}" if study.at_once else ""
    command = ["sbatch", f"--array={ranges(numbers, ',')}{limit}", f"--job-name={study.name}"]
    command += ["--output=%x-%A_%a.log", *options]
    command += [str(script), str(file), *overrides]
    typer.echo(shlex.join(command))
    if dry_run:
        return
    _check_runs(study, numbers, ALL - {"machine", "engines"})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    typer.echo(done.stdout.strip())


def _check_runs(study: Study, numbers: Sequence[int], has: frozenset[Need]) -> None:
    """Check each of these runs that differs by more than name and seed, before the first one starts.

    The data and the user's code are read once for all runs with the same. has: as in ``CheckedRun``; without
    the machine the runs are only prepared here, and those whose model is not here are not checked.
    """
    here = "machine" in has
    checked: list[Settings] = []
    read: list[object] = []
    told: list[str] = []
    for run in (study.runs[number - 1] for number in numbers):
        settings = run.settings.model_copy(update={"name": study.name, "seed": 0})
        if settings in checked:
            continue
        checked.append(settings)
        sections = ("model", "data", "evaluation", "sft", "reward", "rollout")
        inputs = [*(getattr(settings, name) for name in sections), *list_custom_code(settings)]
        needs = has - {"data", "code"} if inputs in read else has
        read.append(inputs)
        settings = with_local_model(settings, hub=here)
        if not here and not settings.model.path.is_dir():  # jobs may see other files
            continue
        try:
            warnings = run_checks(CheckedRun(settings, needs, offline=not here), told=True)
            if here:
                check_memory(settings, 1)
        except UserError as e:
            raise UserError(f"run {run.number} ({run.settings.name}): {e}") from None
        for text in warnings:
            if text not in told:
                typer.echo(f"warning: {text}", err=True)
        told += warnings


def _train_here(study: Study, numbers: Sequence[int]) -> None:
    """Train the runs one after the other, each in a process of its own; go on after one that fails."""
    failed = []
    for number in numbers:
        run = study.runs[number - 1]
        typer.echo(f"\nrun {number} of {len(study.runs)}: {run.settings.name}", nl=True)
        command = module_command("rpg_megatron.cli", "train", study.config, *run.overrides)
        # Signals are the run's: it saves and exits, and its code says so.
        with StopSignals(resumable=True) as signals:
            signals.raising = False
            process, sent = start_program(command, signal.SIGTERM, process_group=None), 0
            while (code := process.poll()) is None:
                # The terminal sends Ctrl-C to the run as well.
                if signals.count > sent and signals.number != signal.SIGINT:
                    process.send_signal(signals.number)
                sent = signals.count
                time.sleep(0.2)
        if signals.number or code == REQUEUE:
            stopped = REQUEUE if signals.warned else 128 + signals.number
            raise typer.Exit(code if code > 0 else 128 - code if code else stopped)
        if code:
            failed.append(run.settings.name)
    if failed:
        names = ", ".join(failed)
        typer.echo(
            f"\n{len(failed)} of {len(numbers)} runs failed: {names}; the same command tries again", err=True
        )
        raise typer.Exit(1)

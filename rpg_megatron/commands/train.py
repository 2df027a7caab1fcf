"""``rpg-megatron train``: a run from the checks to the summary, on this node and the nodes it leads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from rpg_megatron.commands.doctor.gpu import gpu_memory
from rpg_megatron.commands.exit_codes import UNSAVED
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.commands.plan.run_cost import estimate
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.launcher.checks import ALL, CheckedRun, check_start
from rpg_megatron.launcher.cluster import Cluster
from rpg_megatron.launcher.dry_run import describe_start
from rpg_megatron.launcher.environment import record_environment
from rpg_megatron.launcher.failures import note_failure
from rpg_megatron.launcher.fine_tuning import with_steps
from rpg_megatron.launcher.nodes import Nodes
from rpg_megatron.launcher.progress import append_to_log
from rpg_megatron.launcher.run import RunLauncher
from rpg_megatron.launcher.run_dir import finished_steps
from rpg_megatron.launcher.stopping import Interrupted, RunFailed, StopSignals
from rpg_megatron.launcher.summary import summarise

RUN_FILE = "RPG_RUN_FILE"
"""Environment variable with a file that will name the run's folder, for ``rpg_megatron.train``."""


def train(
    settings: Settings,
    signals: StopSignals,
    *,
    fresh: bool = False,
    source: Path | None = None,
    nodes: Nodes | None = None,
) -> Path:
    """Check the settings, run the training to its end, and print a summary. Returns the run's folder.

    fresh: do not resume an unfinished run of this name. source: a checkpoint to start a new run from.
    nodes: the nodes of the run, of which this is the first; None: only this node.
    Raises UserError for user errors, RunFailed if a process died, Interrupted after a signal, typer.Exit if
    the last checkpoint could not be written. All processes have ended in any case, and no folder is left
    except the run's, if it contains information.
    """
    try:
        return _train(settings, signals, fresh, source, nodes)
    except RunFailed as e:
        if not e.note:  # it failed before its folder was there
            e.note = note_failure(settings, e.failure)
        raise


def _train(
    settings: Settings, signals: StopSignals, fresh: bool, source: Path | None, nodes: Nodes | None
) -> Path:
    nodes = nodes or Nodes()
    if nodes.count > 1:
        signals.raising = False  # other nodes must be told
    with Cluster(settings, nodes, signals) as cluster:
        check_start(CheckedRun(settings, nodes=nodes.count))
        check_memory(settings, nodes.count)
        settings = with_choices(with_steps(settings))
        signals.raising = False  # from here on, resources must be cleaned up
        with RunLauncher(settings, signals, fresh=fresh, source=source, cluster=cluster) as run:
            if RUN_FILE in os.environ:
                atomic_write_text(Path(os.environ[RUN_FILE]), str(run.folder))
            try:
                run.notes.extend(record_environment(run.folder, settings))
                run.start()
                run.watch()
            except Interrupted as e:
                run.explain(e)
                raise
    _report(run.folder)
    summary = summarise(run.folder)
    append_to_log(run.log, f"finished\n{summary}")
    print(summary, flush=True)
    if finished_steps(run.folder) is None:
        raise typer.Exit(UNSAVED)
    return run.folder


def dry_run(settings: Settings, nodes: Nodes, *, fresh: bool = False, source: Path | None = None) -> None:
    """Run the checks of ``train`` on this node; on the first one, print what it would start and its cost.

    Starts nothing and creates no folder. Raises UserError.
    """
    if nodes.rank:
        check_start(CheckedRun(settings, ALL - {"data"}, nodes.rank, nodes.count))
        return
    check_start(CheckedRun(settings, nodes=nodes.count))
    check_memory(settings, nodes.count)
    settings = with_choices(with_steps(settings))
    print(describe_start(settings, nodes.count, fresh=fresh, source=source), end="")
    for line in estimate(settings):
        print(f"# {line}")


def check_memory(settings: Settings, nodes: int) -> None:
    """Raise UserError if ``plan`` says that the run does not fit this machine; for GPUs, print a warning.

    A plan for a CPU is for one machine: nothing is said of several nodes. That for GPUs was not measured.
    """
    gpu = gpu_memory() if settings.device == "cuda" else None
    if gpu is None and (settings.device == "cuda" or nodes > 1):
        return
    problems = make_plan(settings, gpu).problems
    if problems and gpu is None:
        raise UserError("; ".join(problems))
    for problem in problems:
        print(f"warning: rpg-megatron plan: {problem}", file=sys.stderr, flush=True)


def with_choices(settings: Settings) -> Settings:
    """The settings with what ``plan`` chooses for this node's GPUs: ``engine.max_sequences`` if it is null,
    ``training.share_prompts`` if it is auto. The same without GPUs.
    """
    if settings.device == "cpu" or (gpu := gpu_memory()) is None:
        return settings
    chosen = make_plan(settings, gpu).settings
    shared = {"share_prompts": chosen.training.share_prompts}
    return settings.changed(engine={"max_sequences": chosen.engine.max_sequences}, training=shared)


def _report(folder: Path) -> None:
    """Write the run's report."""
    from rpg_megatron.commands.report.render import write_report  # imports pyarrow

    try:
        write_report([folder])
    except Exception as e:  # the run itself has succeeded
        print(f"warning: no report was written: {e!r}", flush=True)

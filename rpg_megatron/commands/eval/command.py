"""The processes of an evaluation: engines that load the checkpoint, and the evaluator, their client."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rpg_megatron.checkpoints.run_folder import MODEL
from rpg_megatron.commands.convert.command import convert_to_hf
from rpg_megatron.commands.eval.output_dir import OutputDir, open_output_dir
from rpg_megatron.commands.eval.settings import EvalModel, EvalRequest, check_request, make_request
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import remove
from rpg_megatron.launcher.cluster import Cluster
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.node_agent import NodeAgent
from rpg_megatron.launcher.nodes import NodeAssignment, Nodes
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.rank_env import NodeSpec, base_environment
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS
from rpg_megatron.launcher.stopping import Interrupted, RunFailed, StopSignals
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.system.child import explain, module_command, user_error
from rpg_megatron.system.console import PlainTextConsole

EVALUATOR = "rpg_megatron.commands.eval.process"


def run_evaluation(request: EvalRequest, out: Path | None, signals: StopSignals) -> OutputDir:
    """Evaluate the problems that have no results yet; starts and ends all processes. Returns the folder with
    the results, unlocked.

    out: see ``open_output_dir``. A checkpoint in Megatron's format is first converted, into the output
    folder; the copy is removed at the end. Raises UserError for user errors, RunFailed if a process died,
    Interrupted after a signal. No process is left in any case.
    """
    settings, model = make_request(request)
    check_request(settings, model)
    signals.raising = False  # from here on, resources must be cleaned up
    folder = open_output_dir(out, settings, model.label)
    with contextlib.closing(folder):
        if folder.summary() is None:
            _evaluate(settings, model, signals, folder)
    return folder


def _evaluate(settings: Settings, model: EvalModel, signals: StopSignals, folder: OutputDir) -> None:
    copy = folder.path / MODEL
    try:
        if model.source is not None:
            if not copy.is_dir():  # an earlier start converted it
                shown = display_path(model.source.folder)
                print(f"{model.source}\nconverting {shown}", file=sys.stderr, flush=True)
                convert_to_hf(model.source, copy, signals)
            settings = settings.changed(model={"path": copy})
        _run_processes(settings, signals, folder)
    except Interrupted as e:
        folder.discard = True
        e.note = f"problems graded so far: {folder.graded()}; rerun the same command to resume"
        raise
    except RunFailed as e:
        shown = display_path(folder.path)
        raise RunFailed(f"{e}\nresults so far are in {shown}; rerun the same command to resume") from None
    remove(copy, ignore_errors=True)


def _run_processes(settings: Settings, signals: StopSignals, folder: OutputDir) -> None:
    """Start all processes at once, since each spends its first seconds importing; wait for the evaluator."""
    logs, count = folder.path / LOGS, settings.engine.replicas
    cluster = Cluster(settings, Nodes(), signals)
    with contextlib.ExitStack() as stack:
        engines_only = NodeAssignment(range(0), range(count))
        spec = NodeSpec(settings, folder.path, cluster.token, engines_only, weights="checkpoint")
        agent = stack.enter_context(contextlib.closing(NodeAgent(spec, signals)))
        work = agent.workspace.work
        console = PlainTextConsole(stderr=True)
        progress = Progress(work, steps=0, log=logs / LAUNCHER_LOG, console=console, line_seconds=10.0)
        stack.callback(progress.close)
        progress.status(
            f"evaluation {display_path(folder.path)}\nstarting (takes about a minute): engines {count}"
        )
        cluster.open(folder.path, agent)
        command = module_command(EVALUATOR, folder.path, work, settings.model.path)
        evaluator = cluster.start_here("evaluator", command, base_environment(settings, cluster.token))
        # Not restarted: graded responses are on disk, and rerunning the command resumes.
        engines = Engines(settings, work, cluster, progress, restarts=0)
        signals.check()
        engines.start()

        def is_ending() -> bool:
            signals.check()
            return False

        while evaluator.code is None:
            progress.pump(0.2)
            signals.check()
            cluster.pump()
            engines.check(is_ending)
        progress.pump(0.0)
        if evaluator.code == 0:
            return
        time.sleep(1.0)  # the cause may be a signal to all processes, or an engine that died
        signals.check()
        if (message := user_error(evaluator)) is not None:
            folder.discard = True  # it contains only the message
            raise UserError(message)
        cluster.pump()
        engines.check(is_ending, closely=True)
        raise RunFailed(explain(evaluator))

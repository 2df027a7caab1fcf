"""The processes of an evaluation: engines that load the checkpoint, and the evaluator, their client."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from pathlib import Path
from types import TracebackType

from rpg_megatron.checkpoints.run_folder import MODEL
from rpg_megatron.commands.convert.command import Source, convert_to_hf
from rpg_megatron.commands.eval.output_dir import OutputDir
from rpg_megatron.commands.eval.settings import EvalModel
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import remove
from rpg_megatron.engine.process import EngineProcess, engine_socket
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.rank_env import base_environment
from rpg_megatron.launcher.run import GRACE
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.launcher.supervisor import Interrupted, RunFailed, StopSignals, Supervisor
from rpg_megatron.system.child import explain, user_error
from rpg_megatron.system.console import PlainTextConsole

EVALUATOR = "rpg_megatron.commands.eval.process"
_LINE_SECONDS = 10.0
"""Interval of progress lines without a terminal."""


class Evaluation:
    """The processes and folders of a running evaluation; leaving the context ends and removes them."""

    def __init__(self, settings: Settings, signals: StopSignals, folder: OutputDir):
        self._settings, self._signals, self._folder = settings, signals, folder
        with contextlib.ExitStack() as undo:
            self._supervisor = Supervisor(folder.path / LOGS, signals)
            undo.callback(self._supervisor.close, GRACE)
            self._workspace = self._supervisor.workspace
            self._progress = Progress(
                self._workspace.work,
                steps=0,
                log=folder.path / LOGS / LAUNCHER_LOG,
                console=PlainTextConsole(stderr=True),
                line_seconds=_LINE_SECONDS,
            )
            # Not restarted: graded responses are on disk, and rerunning the command resumes.
            work = self._workspace.work
            self._engines = Engines(settings, work, self._supervisor, self._progress, restarts=0)
            undo.pop_all()

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # the processes must end even if the terminal fails
            self._progress.close()
        self._supervisor.close(GRACE)

    def start(self) -> None:
        """Start all processes at once, since each spends its first seconds importing."""
        settings, work = self._settings, self._workspace.work
        token = secrets.token_urlsafe(32)
        self._progress.status(
            f"evaluation {display_path(self._folder.path)}\n"
            f"starting (takes about a minute): engines {settings.engine.replicas}"
        )
        paths = (self._folder.path, work, settings.model.path)
        command = [sys.executable, "-P", "-m", EVALUATOR, *map(str, paths)]
        self._evaluator = self._supervisor.start("evaluator", command, base_environment(settings, token))
        for index in range(settings.engine.replicas):
            self._signals.check()
            engine = EngineProcess(
                settings,
                index,
                socket=engine_socket(work, index),
                log=self._folder.path / LOGS / f"engine_{index}.log",
                bridge_dir=self._workspace.bridge,
                token=token,
                weights="checkpoint",
                gpus=range(index * settings.engine.tensor, (index + 1) * settings.engine.tensor),
            )
            self._engines.start(engine)

    def watch(self) -> None:
        """Return when all problems are graded. Raises UserError, RunFailed or Interrupted."""
        while (code := self._evaluator.exit_code()) is None:
            self._progress.pump(0.2)
            self._signals.check()
            self._check_engines()
        self._progress.pump(0.0)
        if code == 0:
            return
        time.sleep(1.0)  # the cause may be a signal to all processes, or an engine that died
        self._signals.check()
        message = user_error(self._evaluator)
        if message is not None:
            self._folder.discard = True  # it contains only the message
            raise UserError(message)
        self._check_engines(closely=True)
        raise RunFailed(self._keep(explain(self._evaluator)))

    def _check_engines(self, closely: bool = False) -> None:
        try:
            self._engines.check(self._is_ending, closely=closely)
        except RunFailed as e:
            raise RunFailed(self._keep(str(e))) from None

    def _is_ending(self) -> bool:
        self._signals.check()
        return False

    def _keep(self, message: str) -> str:
        folder = display_path(self._folder.path)
        return f"{message}\nresults so far are in {folder}; rerun the same command to resume"


def run_evaluation(settings: Settings, model: EvalModel, signals: StopSignals, folder: OutputDir) -> None:
    """Evaluate the remaining problems; starts and ends all processes.

    A checkpoint in Megatron's format is first converted, into the output folder; the copy is removed at the
    end. Raises UserError for user errors, RunFailed if a process died, Interrupted after a signal. No process
    is left in any case.
    """
    copy = folder.path / MODEL
    try:
        if model.source is not None:
            loaded = settings.model.model_copy(update={"path": _convert(model.source, copy, signals)})
            settings = settings.model_copy(update={"model": loaded})
        with Evaluation(settings, signals, folder) as evaluation:
            evaluation.start()
            evaluation.watch()
    except Interrupted as e:
        folder.discard = True
        e.note = f"problems graded so far: {folder.graded()}; rerun the same command to resume"
        raise
    remove(copy, ignore_errors=True)


def _convert(source: Source, out: Path, signals: StopSignals) -> Path:
    """Convert a checkpoint for the engines, unless an earlier start did. Raises as ``run_evaluation``."""
    if out.is_dir():
        return out
    print(f"{source}\nconverting {display_path(source.folder)}", file=sys.stderr, flush=True)
    convert_to_hf(source, out, signals)
    return out

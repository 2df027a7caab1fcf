"""One job from start to end: starts engines, sampler and trainer ranks, and monitors them until they exit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.cluster import ENGINES_START, JOB_END_VARIABLE
from rpg_megatron.config.files import remove
from rpg_megatron.launcher.bandwidth import MEASURE
from rpg_megatron.launcher.cluster import Cluster, Process
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.environment import record_end
from rpg_megatron.launcher.failures import judge, note_failure
from rpg_megatron.launcher.node_agent import NodeAgent
from rpg_megatron.launcher.nodes import Nodes, assign_node, end_of_job, transport_note
from rpg_megatron.launcher.progress import Progress, append_to_log
from rpg_megatron.launcher.rank_env import (
    RANK,
    NodeSpec,
    base_environment,
    cluster_environment,
    sampler_command,
)
from rpg_megatron.launcher.resume import ORIGIN, open_run
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS
from rpg_megatron.launcher.stopping import Interrupted, RunFailed, StopSignals
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.system.child import explain, user_error
from rpg_megatron.system.metrics_file import METRICS
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.training.preemption import REQUEUE

GRACE = 15.0
"""Seconds for ranks to end after one of them has saved."""
_KEEP_SECONDS = 120.0
"""How long a stopped run, whose state is saved, waits for the groups of the unfinished step to be written."""


class RunLauncher:
    """The processes and folders of a running job; leaving the context ends and removes them.

    rank_module: module that the ranks run with ``python -m``; None: they train. engines: whether the job
    needs engines and a sampler. engine_settings: settings of the engines, if not the run's. synced: whether
    engines receive the ranks' weights; otherwise they keep the weights that they load. fresh, source: see
    ``open_run``. console: where progress is shown; None: stdout. cluster: the nodes; None: this one alone.
    """

    def __init__(
        self,
        settings: Settings,
        signals: StopSignals,
        *,
        rank_module: str | None = None,
        engines: bool = True,
        engine_settings: Settings | None = None,
        synced: bool = True,
        fresh: bool = False,
        source: Path | None = None,
        console: Console | None = None,
        cluster: Cluster | None = None,
    ):
        self._settings = settings
        self._cluster = cluster or Cluster(settings, Nodes(), signals)
        self._synced = synced
        self._trains = rank_module is None
        self._uses_engines, self._signals = engines, signals
        self._opened = open_run(settings, fresh=fresh, source=source)
        self.folder, self.notes = self._opened.folder, self._opened.notes
        self.log = self.folder / LOGS / LAUNCHER_LOG
        self._sampler: Process | None = None
        # Only training syncs weights to a restarted engine; in other jobs its weights would be random.
        self._max_restarts = settings.engine.restarts if self._trains else 0
        self._discard = self._all_started = False
        self._warned: float | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._opened.close)
            if self._opened.is_new:
                undo.callback(remove, self.folder, ignore_errors=True)
            spec = NodeSpec(
                settings,
                self.folder,
                self._cluster.token,
                assign_node(settings, 0, self._cluster.nodes.count),
                address=self._cluster.address,
                rank_module=rank_module or RANK,
                engine_settings=engine_settings,
            )
            self._agent = NodeAgent(spec, signals)
            undo.callback(self._agent.close)
            self._progress = Progress(
                self._agent.workspace.work,
                steps=settings.training.steps if self._trains else 0,
                metrics=self.folder / METRICS,
                log=self.log,
                console=console,
            )
            places = self._agent.workspace.work, self._cluster, self._progress
            self._engines = Engines(settings, *places, restarts=self._max_restarts)
            undo.pop_all()

    def __enter__(self) -> RunLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # the processes must end even if the terminal fails
            self._progress.close()
        if isinstance(error, RunFailed):
            with contextlib.suppress(OSError):  # a file system that fails
                error.args = (self._keep(str(error)),)
        if error is not None:
            append_to_log(self.log, f"{type(error).__name__}: {error}")
        if self._trains and not self._discard:
            with contextlib.suppress(OSError):  # a file system that fails
                self._record_end(error)
        self._cluster.dismiss(error)  # other nodes end their processes at the same time
        self._agent.close()
        if self._discard:
            remove(self.folder, ignore_errors=True)
        self._opened.close()

    def _record_end(self, error: BaseException | None) -> None:
        """Write how the run ended into its folder; after a failure of the machine, ask for a restart."""
        failure = error.failure if isinstance(error, RunFailed) else None
        text = failure.cause if failure else "finished" if error is None else (str(error) or repr(error))
        step = next(iter(list_steps(self.folder)), 0)
        record_end(self.folder, text, step, failure.nodes if failure and failure.machine else None)
        if isinstance(error, RunFailed):
            error.note = note_failure(self._settings, error.failure, step)
            if error.note:
                append_to_log(self.log, error.note)

    def start(self) -> None:
        """Start all processes at the same time, since each spends its first seconds importing.

        With colocated engines, the ranks build the model when the engines sleep.
        """
        settings, cluster = self._settings, self._cluster
        if (end := end_of_job()) is not None:
            os.environ[JOB_END_VARIABLE] = str(end)  # for the ranks
        cluster.open(self.folder, self._agent)
        for line in self.notes or [f"run {display_path(self.folder)}"]:
            self._progress.status(line)
        for line in settings.notes() if self._trains else ():
            self._progress.status(f"note: {line}")
        if cluster.nodes.count > 1 and settings.cluster.min_bandwidth != 0:
            self._progress.status(f"note: {MEASURE}")
        if self._uses_engines:
            self._progress.status(
                "starting (takes about a minute): "
                + (f"engines {settings.engine.replicas}, " if settings.engine.replicas else "")
                + f"trainer ranks {settings.parallel.world}"
            )
            if note := transport_note(settings, cluster.nodes.count):
                self._progress.status(note)
            self._start_rollouts()
        waits = self._uses_engines and settings.engine.colocated and self._synced
        if waits:
            (self._agent.workspace.work / ENGINES_START).touch()
        self._check_signals()
        cluster.start_ranks(self._opened.checkpoint)
        while self._agent.forking:
            self._pump(0.1)
        if waits:
            self._put_engines_to_sleep()
        self._all_started = True

    def _pump(self, seconds: float) -> None:
        """Show progress for so long. Raises as ``watch``."""
        self._progress.pump(seconds)
        self._check_signals()
        self._cluster.pump()
        self._check_children()
        if self._warned is None:
            self._check_engines()

    def _start_rollouts(self) -> None:
        """Start engines and the sampler."""
        self._check_signals()
        self._engines.start()
        cluster = self._cluster
        environment = base_environment(self._settings, cluster.token)
        if cluster.address:
            environment |= cluster_environment(cluster.address)
        command = sampler_command(self.folder, self._agent.workspace)
        self._sampler = cluster.start_here("sampler", command, environment)

    def _put_engines_to_sleep(self) -> None:
        """Wait until all engines are up, then put them to sleep, which frees their GPU memory.

        A starting engine allocates weights, KV cache and the activations of its largest batch; a rank that
        builds the model all of its state. Both at once may exceed the GPU's memory. So ranks import and wait.
        """
        while not self._engines.all_up:
            self._pump(0.2)
        self._engines.sleep()
        remove(self._agent.workspace.work / ENGINES_START)
        self._progress.status("engines sleep; the trainer ranks build the model")

    def watch(self) -> None:
        """Return when all ranks have exited with code 0. Raises UserError, RunFailed or Interrupted."""
        while self._running():
            self._pump(0.2)
        self._check_children()

    def explain(self, stop: Interrupted) -> None:
        """Add to the message of an interrupted run how to resume it, or where its folder is."""
        newest = next(iter(list_steps(self.folder).values()), None)
        has_origin = (self.folder / ORIGIN).exists()
        if stop.requeue and newest is None and self._opened.is_new and not has_origin:
            self._discard = True  # the same command creates it again
            stop.note = "no step was done; rerun the same command to start again"
            return
        if stop.requeue:
            start = display_path(newest) if newest else "the beginning"
            stop.note = f"rerun the same command to resume from {start}"
        elif newest:
            stop.note = (
                f"work after {display_path(newest)} is lost; rerun the same command to resume from there"
            )
        else:
            stop.note = f"the run's folder is kept: {display_path(self.folder)}"
        if self._settings.checkpoint.every is None and self._trains:
            stop.note += "; checkpoint.every is null, so nothing was saved"

    def _running(self) -> bool:
        return any(rank.code is None for rank in self._cluster.ranks)

    def _check_signals(self) -> None:
        """Forward a scheduler's warning, or the first Ctrl-C, to the ranks, which save and exit.

        Any other signal, and a second one, ends the run; so does Ctrl-C before the first step is done.
        """
        signals, settings = self._signals, self._settings.checkpoint
        if not signals.number:
            return
        by_hand = signals.number == signal.SIGINT
        saves = signals.saves and settings.every is not None
        ready = self._all_started and (self._progress.started_training or not by_hand)
        if not saves or signals.count > 1 or not ready:
            raise Interrupted(signals.number, requeue=saves and not ready and not by_hand)
        name = "Ctrl-C" if by_hand else signal.Signals(signals.number).name
        if self._warned is None:
            self._warned = time.monotonic()
            again = "press Ctrl-C again to stop without saving" if by_hand else "a second signal ends the run"
            self._progress.status(f"warning: {name}: saving, then exiting; {again}")
            for process in (*self._cluster.ranks, *([self._sampler] if self._sampler else ())):
                process.warn()
            if self._settings.engine.colocated:  # saving needs GPU memory
                self._engines.stop(grace=2.0)
        elif time.monotonic() - self._warned > settings.grace:
            self._progress.status(
                f"warning: {name}: nothing was saved within {settings.grace:.0f} s (checkpoint.grace)"
            )
            raise Interrupted(signals.number)

    def _check_stopped(self) -> None:
        """Raise Interrupted if children exited because of a warning to the launcher or to all processes."""
        self._check_signals()
        ended = (REQUEUE, *(-number for number in WARNINGS))
        codes = [process.code for process in self._failed()]
        if REQUEUE in codes or (self._warned and all(code in ended for code in codes)):
            end = time.monotonic() + GRACE
            while REQUEUE in codes and self._running() and time.monotonic() < end:
                self._progress.pump(0.1)
                self._cluster.pump()
            self._wait_for_sampler()
            raise Interrupted(self._signals.number or signal.SIGTERM, requeue=True)

    def _failed(self) -> list[Process]:
        """Processes that failed, the most likely cause first; no warned sampler, which ranks do not need."""
        warned = self._sampler if self._warned is not None else None
        return [process for process in self._cluster.failed() if process is not warned]

    def _wait_for_sampler(self) -> None:
        """Wait while the sampler keeps the groups of the unfinished step, if there is a checkpoint for them.

        The state is saved by now, and the job must end before Slurm kills it.
        """
        if self._sampler is None or self._sampler.code is not None or not list_steps(self.folder):
            return
        self._sampler.warn()  # again, or for the first time if only the ranks were signalled
        now = time.monotonic()
        end = min((self._warned or now) + self._settings.checkpoint.grace, now + _KEEP_SECONDS)
        while self._sampler.code is None and time.monotonic() < end and self._signals.count < 2:
            self._progress.pump(0.1)
            with contextlib.suppress(RunFailed, UserError):  # other nodes are no longer needed
                self._cluster.pump()

    def _check_children(self) -> None:
        if not self._failed():
            early = [p for p in self._cluster.processes.values() if not p.is_rank and p.code == 0]
            if early and self._running() and not self._warned:
                time.sleep(1.0)
                self._check_signals()
                if not self._warned:
                    raise RunFailed(explain(early[0]), judge(early))
            return
        time.sleep(1.0)  # other processes may fail as a result; one of their logs may explain more
        self._progress.pump(0.0)  # the last step before the failure
        self._cluster.pump()
        if self._cluster.ranks and all(rank.code == 0 for rank in self._cluster.ranks):
            return  # the run is complete: only the ranks were still needed
        self._check_stopped()
        dead = self._failed()[0]
        message = user_error(dead)
        if message is None:
            if not self._max_restarts:
                # The cause may be a dying engine, whose main process stays alive for seconds.
                self._check_engines(closely=True)
            raise RunFailed(explain(dead), judge(self._failed()))
        if self._progress.started_training or not self._opened.is_new:
            raise UserError(self._keep(message))
        self._discard = True  # the folder contains only this message
        raise UserError(message)

    def _check_engines(self, closely: bool = False) -> None:
        try:
            self._engines.check(self._is_ending, closely=closely)
        except UserError as e:
            raise UserError(self._keep(str(e))) from None

    def _is_ending(self) -> bool:
        self._check_signals()
        return self._warned is not None

    def _keep(self, message: str) -> str:
        """The message of a failure with the place of the run's folder, and how to resume it."""
        newest = next(iter(list_steps(self.folder).values()), None) if self._trains else None
        resume = ""
        if newest is not None and "rerun the same command" not in message:
            resume = f"; the same command resumes it from {display_path(newest)}"
        return f"{message}\nthe run's folder is kept: {display_path(self.folder)}{resume}"

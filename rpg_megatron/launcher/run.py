"""One job from start to end: starts engines, sampler and trainer ranks, and monitors them until they exit."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.cluster import JOB_END_VARIABLE
from rpg_megatron.config.files import remove
from rpg_megatron.engine.process import EngineProcess, engine_socket, write_addresses
from rpg_megatron.launcher.bandwidth import MEASURE
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.environment import record_end
from rpg_megatron.launcher.failures import judge, note_failure, own_host
from rpg_megatron.launcher.nodes import assign_node, end_of_job, free_port, transport_note
from rpg_megatron.launcher.progress import Progress, append_to_log
from rpg_megatron.launcher.rank_env import (
    RANK,
    RankLaunchSpec,
    base_environment,
    cluster_environment,
    forked_start,
    rank_starts,
    sampler_command,
)
from rpg_megatron.launcher.remote_nodes import RemoteNodes, RemoteRank
from rpg_megatron.launcher.resume import ORIGIN, open_run
from rpg_megatron.launcher.run_dir import LAUNCHER_LOG, LOGS
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.launcher.supervisor import Interrupted, RunFailed, StopSignals, Supervisor
from rpg_megatron.system.child import Child, ProcessStatus, explain, user_error
from rpg_megatron.system.forked_ranks import STATUS, ForkedRank
from rpg_megatron.system.metrics_file import METRICS
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.training.preemption import REQUEUE

GRACE = 15.0
"""Seconds from SIGTERM to SIGKILL."""
_KEEP_SECONDS = 120.0
"""How long a stopped run, whose state is saved, waits for the groups of the unfinished step to be written."""


class RunLauncher:
    """The processes and folders of a running job; leaving the context ends and removes them.

    rank_module: module that the ranks run with ``python -m``; None: they train. engines: whether the job
    needs engines and a sampler. engine_settings: settings of the engines, if not the run's. synced: whether
    engines receive the ranks' weights; otherwise they keep the weights that they load. fresh, source: see
    ``open_run``. console: where progress is shown; None: stdout. remote: the other nodes, if any.
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
        remote: RemoteNodes | None = None,
    ):
        self._settings = settings
        self._remote = remote
        self._assignment = remote.assignment if remote else assign_node(settings, 0, 1)
        self._engine_settings, self._synced = engine_settings or settings, synced
        self._rank_module, self._trains = rank_module or RANK, rank_module is None
        self._uses_engines, self._signals = engines, signals
        self._opened = open_run(settings, fresh=fresh, source=source)
        self.folder, self.notes = self._opened.folder, self._opened.notes
        self.log = self.folder / LOGS / LAUNCHER_LOG
        self._ranks: list[Child | ForkedRank | RemoteRank] = []
        self._sampler: Child | None = None
        # Only training syncs weights to a restarted engine; in other jobs its weights would be random.
        self._max_restarts = settings.engine.restarts if self._trains else 0
        self._discard = self._all_started = False
        self._warned: float | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._opened.close)
            if self._opened.is_new:
                undo.callback(remove, self.folder, ignore_errors=True)
            self._supervisor = Supervisor(self.folder / LOGS, signals)
            undo.callback(self._supervisor.close, GRACE)
            self._workspace = self._supervisor.workspace
            self._progress = Progress(
                self._workspace.work,
                steps=settings.training.steps if self._trains else 0,
                metrics=self.folder / METRICS,
                log=self.log,
                console=console,
            )
            self._engines = Engines(
                settings,
                self._workspace.work,
                self._supervisor,
                self._progress,
                restarts=self._max_restarts,
                remote=remote,
            )
            undo.pop_all()

    def __enter__(self) -> RunLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # the processes must end even if the terminal fails
            self._progress.close()
        if error is not None:
            append_to_log(self.log, f"{type(error).__name__}: {error}")
        if self._trains and not self._discard:
            with contextlib.suppress(OSError):  # a file system that fails
                self._record_end(error)
        if self._remote:  # other nodes end their processes at the same time
            self._remote.dismiss(error)
        self._supervisor.close(GRACE)
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

        With colocated engines, the ranks start when the engines sleep.
        """
        settings, work, bridge = self._settings, self._workspace.work, self._workspace.bridge
        remote, assignment = self._remote, self._assignment
        if (end := end_of_job()) is not None:
            os.environ[JOB_END_VARIABLE] = str(end)  # for the ranks
        token = remote.token if remote else secrets.token_urlsafe(32)
        write_addresses(work, remote.prepare(self.folder) if remote else {})
        for line in self.notes or [f"run {display_path(self.folder)}"]:
            self._progress.status(line)
        for line in settings.notes() if self._trains else ():
            self._progress.status(f"note: {line}")
        if remote and settings.cluster.min_bandwidth != 0:
            self._progress.status(f"note: {MEASURE}")
        if self._uses_engines:
            self._progress.status(
                "starting (takes about a minute): "
                + (f"engines {settings.engine.replicas}, " if settings.engine.replicas else "")
                + f"trainer ranks {settings.parallel.world}"
            )
            if note := transport_note(settings, remote.nodes.count if remote else 1):
                self._progress.status(note)
            self._start_rollouts(token)
            if settings.engine.colocated and self._synced:
                self._put_engines_to_sleep()
        address = remote.address if remote else "127.0.0.1"
        start = RankLaunchSpec(
            folder=str(self.folder),
            checkpoint=str(self._opened.checkpoint) if self._opened.checkpoint else None,
            address=address,
            port=free_port(address) if remote else 0,
        )
        arguments = (work, bridge, token, address if remote else None, self._rank_module)
        starts = list(rank_starts(settings, assignment, start, *arguments))
        if settings.device == "cpu" and not remote and len(starts) > 1:
            self._fork_ranks(starts)
        else:
            for name, command, environment in starts:
                self._check_signals()
                self._ranks.append(self._supervisor.start(name, command, environment))
        if remote:
            remote.start_ranks(start)
            self._ranks += remote.ranks.values()
            self._supervisor.elsewhere += remote.ranks.values()
        self._all_started = True

    def _fork_ranks(self, starts: Sequence[tuple[str, list[str], dict[str, str]]]) -> None:
        """Start a process that imports what ranks need, and wait until it has forked them."""
        logs, status = self.folder / LOGS, self._workspace.work / STATUS
        parent = self._supervisor.start("ranks", *forked_start(starts, logs))
        while not status.exists():
            self._pump(0.1)
        self._ranks += [ForkedRank(rank, logs, status, parent) for rank in range(len(starts))]
        self._supervisor.elsewhere += self._ranks

    def _pump(self, seconds: float) -> None:
        """Show progress for so long. Raises as ``watch``."""
        self._progress.pump(seconds)
        self._check_signals()
        self._check_nodes()
        self._check_children()
        if self._warned is None:
            self._check_engines()

    def _start_rollouts(self, token: str) -> None:
        """Start engines and the sampler."""
        settings, others = self._settings, self._remote.engines if self._remote else {}
        for index in range(settings.engine.replicas):
            self._check_signals()
            self._engines.start(others.get(index) or self._make_engine(index, token))
        self._check_signals()
        sampler = sampler_command(settings, self.folder, self._workspace.work, self._workspace.bridge)
        cluster = cluster_environment(self._remote.address) if self._remote else {}
        self._sampler = self._supervisor.start(
            "sampler", sampler, base_environment(settings, token) | cluster
        )

    def _put_engines_to_sleep(self) -> None:
        """Wait until all engines are up, then put them to sleep, which frees their GPU memory.

        A starting engine allocates weights, KV cache and the activations of its largest batch; a starting
        rank allocates all of its state. Both at once may exceed the GPU's memory.
        """
        while not self._engines.all_up:
            self._pump(0.2)
        try:
            self._engines.sleep()
        except RunFailed as e:
            raise RunFailed(self._keep(str(e)), e.failure) from None
        self._progress.status("engines sleep; starting trainer ranks")

    def _make_engine(self, index: int, token: str) -> EngineProcess:
        return EngineProcess(
            self._engine_settings,
            index,
            socket=engine_socket(self._workspace.work, index),
            log=self.folder / LOGS / f"engine_{index}.log",
            bridge_dir=self._workspace.bridge,
            token=token,
            gpus=self._assignment.gpus(self._settings, index),
            extra=cluster_environment(self._remote.address) if self._remote else None,
        )

    def watch(self) -> None:
        """Return when all ranks have exited with code 0. Raises UserError, RunFailed or Interrupted."""
        while self._running():
            self._pump(0.2)
        self._check_children()

    def discard(self) -> None:
        """Remove the run's folder at the end, because nothing in it is needed."""
        self._discard = True

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
        return any(rank.exit_code() is None for rank in self._ranks)

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
            for rank in self._ranks:
                if rank.exit_code() is None:
                    rank.warn()
            if self._sampler is not None and self._sampler.exit_code() is None:
                self._sampler.warn()
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
        codes = [child.exit_code() for child in self._failed()]
        if REQUEUE in codes or (self._warned and all(code in ended for code in codes)):
            end = time.monotonic() + GRACE
            while REQUEUE in codes and self._running() and time.monotonic() < end:
                self._progress.pump(0.1)
                self._check_nodes()
            self._wait_for_sampler()
            raise Interrupted(self._signals.number or signal.SIGTERM, requeue=True)

    def _failed(self) -> list[ProcessStatus]:
        """Processes that failed, the most likely cause first; no warned sampler, which ranks do not need."""
        warned = self._sampler if self._warned is not None else None
        return [child for child in self._supervisor.failed() if child is not warned]

    def _wait_for_sampler(self) -> None:
        """Wait while the sampler keeps the groups of the unfinished step, if there is a checkpoint for them.

        The state is saved by now, and the job must end before Slurm kills it.
        """
        if self._sampler is None or self._sampler.exit_code() is not None or not list_steps(self.folder):
            return
        self._sampler.warn()  # again, or for the first time if only the ranks were signalled
        now = time.monotonic()
        end = min((self._warned or now) + self._settings.checkpoint.grace, now + _KEEP_SECONDS)
        while self._sampler.exit_code() is None and time.monotonic() < end and self._signals.count < 2:
            self._progress.pump(0.1)

    def _check_nodes(self) -> None:
        """Receive messages of other nodes. Raises UserError or RunFailed if one of them fails or is lost."""
        if self._remote is None:
            return
        try:
            self._remote.pump()
        except RunFailed as e:
            raise RunFailed(self._keep(str(e)), e.failure) from None

    def _check_children(self) -> None:
        if not self._failed():
            early = [c for c in self._supervisor.children if c not in self._ranks and c.exit_code() == 0]
            if early and self._running() and not self._warned:
                time.sleep(1.0)
                self._check_signals()
                if not self._warned:
                    raise RunFailed(self._keep(explain(early[0])), judge(early, own_host()))
            return
        time.sleep(1.0)  # other processes may fail as a result; one of their logs may explain more
        self._progress.pump(0.0)  # the last step before the failure
        self._check_nodes()
        if self._ranks and all(rank.exit_code() == 0 for rank in self._ranks):
            return  # the run is complete: only the ranks were still needed
        self._check_stopped()
        dead = self._failed()[0]
        message = user_error(dead)
        if message is None:
            if not self._max_restarts:
                # The cause may be a dying engine, whose main process stays alive for seconds.
                self._check_engines(closely=True)
            raise RunFailed(self._keep(explain(dead)), judge(self._failed(), own_host()))
        if self._progress.started_training or not self._opened.is_new:
            raise UserError(self._keep(message))
        self._discard = True  # the folder contains only this message
        raise UserError(message)

    def _check_engines(self, closely: bool = False) -> None:
        try:
            self._engines.check(self._is_ending, closely=closely)
        except UserError as e:
            raise UserError(self._keep(str(e))) from None
        except RunFailed as e:
            raise RunFailed(self._keep(str(e)), e.failure) from None

    def _is_ending(self) -> bool:
        self._check_signals()
        return self._warned is not None

    def _keep(self, message: str) -> str:
        newest = next(iter(list_steps(self.folder).values()), None) if self._trains else None
        resume = ""
        if newest is not None and "rerun the same command" not in message:
            resume = f"; the same command resumes it from {display_path(newest)}"
        return f"{message}\nthe run's folder is kept: {display_path(self.folder)}{resume}"

"""One run from start to end: engines, sampler and trainer ranks as processes, watched until they are done."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Container
from pathlib import Path
from types import TracebackType

from rich.console import Console

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import EngineProcess, engine_socket, write_addresses
from rpg_megatron.engine.restarts import (
    begin_incarnation,
    has_answered,
    is_trainers_turn,
    set_gpu_owner,
    take_request,
)
from rpg_megatron.launcher.nodes import free_port, share_of, transport_note
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.rank_env import (
    RANK,
    RankLaunchSpec,
    base_environment,
    cluster_environment,
    rank_starts,
)
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.remote_nodes import RemoteEngine, RemoteNodes, RemoteRank
from rpg_megatron.launcher.resume import ORIGIN, open_run
from rpg_megatron.launcher.run_dir import LOGS, METRICS
from rpg_megatron.launcher.scratch_dirs import create_workspace
from rpg_megatron.launcher.summary import shown
from rpg_megatron.launcher.supervisor import (
    Child,
    Interrupted,
    RunFailed,
    StopSignals,
    Supervisor,
    explain,
    tail,
    user_error,
)
from rpg_megatron.system import process_groups
from rpg_megatron.training.preemption import REQUEUE, WARNINGS

SAMPLER = "rpg_megatron.rollout.sampler"
GRACE = 15.0
"""Seconds that children have to leave after SIGTERM."""
_PROBE_SECONDS = 0.5


class RunLauncher:
    """Everything that a run holds while it is under way; leaving the context gives it all back.

    rank_module: what the ranks run with ``python -m``, if they do not train. engines: whether the job needs
    engines and a sampler. engine_settings: the engines' settings, where they are not the run's. synced:
    whether engines get the ranks' weights; else they keep what they load. fresh, source: see
    ``training.train``. console: where progress is shown, if not on stdout. team: the other nodes, if there
    are some.
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
        team: RemoteNodes | None = None,
    ):
        self._settings = settings
        self._team = team
        self._share = team.share if team else share_of(settings, 0, 1)
        self._engine_settings, self._synced = engine_settings or settings, synced
        self._rank_module, self._trains, self._uses_engines = (
            rank_module or RANK,
            rank_module is None,
            engines,
        )
        self._signals = signals
        self._opened = open_run(settings, fresh=fresh, source=source)
        self.folder = self._opened.folder
        self._ranks: list[Child | RemoteRank] = []
        self._engines: list[EngineProcess | RemoteEngine] = []
        self._healthy: set[int] = set()
        # Only training goes on with an engine that comes back; elsewhere its weights would be random.
        self._most_restarts = settings.engine.restarts if self._trains else 0
        self._restarts: dict[int, int] = {}
        self._waiting: set[int] = set()
        """Engines to be started when the ranks leave the GPUs that they share."""
        self._started: dict[int, float] = {}
        self._discard = False
        self._all_started = False
        self._warned: float | None = None
        self._probed = time.monotonic()
        try:
            self._guardian = Reaper()
            self._workspace = create_workspace()
            self._guardian.guard_path(self._workspace.work)
            self._guardian.guard_path(self._workspace.bridge)
            self._progress = Progress(
                self._workspace.work,
                steps=settings.training.steps if self._trains else 0,
                metrics=self.folder / METRICS,
                console=console,
            )
            self._supervisor = Supervisor(self._guardian, self.folder / LOGS)
        except BaseException:
            if hasattr(self, "_workspace"):
                self._workspace.remove()
            if hasattr(self, "_guardian"):
                self._guardian.dismiss()
            if self._opened.made:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._opened.close()
            raise

    def __enter__(self) -> RunLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # whatever the terminal does, the processes must end
            self._progress.close()
        if self._team:  # they leave while this node's processes do
            self._team.dismiss(error)
        seen = self._signals.count
        self._supervisor.stop(GRACE, hurry=lambda: self._signals.count > seen)
        self._workspace.remove()
        if self._discard:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._opened.close()
        self._guardian.dismiss()

    def start(self) -> None:
        """Start all processes at once: each spends its first seconds importing.

        Where they share GPUs the engines come first, and the ranks when those sleep.
        """
        settings, work, bridge = self._settings, self._workspace.work, self._workspace.bridge
        team, share = self._team, self._share
        token = team.token if team else secrets.token_urlsafe(32)
        elsewhere = team.prepare(self.folder) if team else {}
        write_addresses(work, elsewhere)
        for line in self._opened.notes or [f"run {shown(self.folder)}"]:
            self._progress.status(line)
        if self._uses_engines:
            self._progress.status(
                f"starting (takes about a minute): engines {settings.engine.replicas}, "
                f"trainer ranks {settings.parallel.world}"
            )
            if note := transport_note(settings, team.nodes.count if team else 1):
                self._progress.status(note)
            self._start_rollouts(token, elsewhere)
            if settings.engine.colocated and self._synced:
                self._have_engines_sleep()
        address = team.address if team else "127.0.0.1"
        start = RankLaunchSpec(
            folder=str(self.folder),
            checkpoint=str(self._opened.checkpoint) if self._opened.checkpoint else None,
            address=address,
            port=settings.rendezvous_port or free_port(address),
        )
        for name, command, environment in rank_starts(
            settings, share, start, work, bridge, token, address if team else None, self._rank_module
        ):
            self._check_signals()
            self._ranks.append(self._supervisor.start(name, command, environment))
        if team:
            team.start_ranks(start)
            self._ranks += team.ranks.values()
            self._supervisor.elsewhere += team.ranks.values()
        self._all_started = True

    def _start_rollouts(self, token: str, elsewhere: Container[int]) -> None:
        """Engines and the sampler; elsewhere: engines that are on other nodes."""
        settings, team = self._settings, self._team
        for index in range(settings.engine.replicas):
            self._check_signals()
            engine = team.engines[index] if team and index in elsewhere else self._make_engine(index, token)
            engine.start()
            self._adopt(engine)
            self._engines.append(engine)
            self._started[index], self._restarts[index] = time.monotonic(), 0
        self._check_signals()
        places = [str(self.folder), str(self._workspace.work), str(self._workspace.bridge)]
        sampler = [sys.executable, "-m", SAMPLER, *places]
        self._supervisor.start("sampler", sampler, base_environment(settings, token))

    def _have_engines_sleep(self) -> None:
        """Wait until all engines are up, and have them give their memory away.

        An engine takes weights, KV cache and a largest batch's activations while it starts, a rank all of its
        state while it builds: together they may be more than the GPU has, though neither is when it is used.
        """
        while len(self._healthy) < len(self._engines):
            self._progress.pump(0.2)
            self._check_signals()
            self._check_nodes()
            self._check_children()
            self._check_engines()
        for engine in self._engines:
            try:
                engine.sleep()
            except RuntimeError as e:
                end = f"the end of {shown(engine.log)}:\n{tail(engine.log)}"
                raise RunFailed(self._keep(f"engine {engine.index} {e}; {end}")) from None
        set_gpu_owner(self._workspace.work, trainers=True)
        self._progress.status("engines sleep; starting trainer ranks")

    def _make_engine(self, index: int, token: str) -> EngineProcess:
        return EngineProcess(
            self._engine_settings,
            index,
            socket=engine_socket(self._workspace.work, index),
            log=self.folder / LOGS / f"engine_{index}.log",
            bridge_dir=self._workspace.bridge,
            token=token,
            gpus=self._share.gpus(self._settings, index),
            extra=cluster_environment(self._team.address) if self._team else None,
        )

    def _adopt(self, engine: EngineProcess | RemoteEngine) -> None:
        if isinstance(engine, RemoteEngine):
            return  # its own node's launcher ends it
        self._supervisor.adopt(engine)

    def watch(self) -> None:
        """Return when all ranks have ended well. Raises UserError, RunFailed or Interrupted."""
        while self._running():
            self._progress.pump(0.2)
            self._check_signals()
            self._check_nodes()
            self._check_children()
            if self._warned is None:
                self._check_engines()
        self._check_children()

    def discard(self) -> None:
        """Remove the run's folder at the end: all that it tells is known."""
        self._discard = True

    def explain(self, stop: Interrupted) -> None:
        """Say in the message of a run that a signal ended what became of it."""
        newest = next(iter(list_steps(self.folder).values()), None)
        asked = (self.folder / ORIGIN).exists()
        if stop.requeue and newest is None and self._opened.made and not asked:
            self._discard = True  # the same command makes it again
            stop.note = "no step was done; the same command starts it again"
            return
        if stop.requeue:
            stop.note = f"the same command goes on from {shown(newest) if newest else 'the beginning'}"
        elif newest:
            stop.note = f"what came after {shown(newest)} is lost; the same command goes on from there"
        else:
            stop.note = f"the run's folder stays: {shown(self.folder)}"
        if self._settings.checkpoint.every is None and self._trains:
            stop.note += "; checkpoint.every is null, so nothing was saved"

    def _running(self) -> bool:
        return any(rank.exit_code() is None for rank in self._ranks)

    def _check_signals(self) -> None:
        """Pass a scheduler's warning on to the ranks, which save and leave; any other signal, or a second
        one, ends the run.
        """
        signals, settings = self._signals, self._settings.checkpoint
        if not signals.number:
            return
        saves = signals.warned and settings.every is not None
        if not saves or signals.count > 1 or not self._all_started:
            raise Interrupted(signals.number, requeue=saves and not self._all_started)
        name = signal.Signals(signals.number).name
        if self._warned is None:
            self._warned = time.monotonic()
            self._progress.status(f"warning: {name}: saving, then leaving; a second one ends the run at once")
            for rank in self._ranks:
                if rank.exit_code() is None:
                    rank.warn()
            if self._settings.engine.colocated:  # what the ranks save needs the GPUs' memory
                for engine in self._engines:
                    engine.stop(grace=2.0)
        elif time.monotonic() - self._warned > settings.grace:
            self._progress.status(
                f"warning: {name}: nothing was saved within {settings.grace:.0f} s (checkpoint.grace)"
            )
            raise Interrupted(signals.number)

    def _check_stopped(self) -> None:
        """Raise Interrupted if it was a warning that made children end: one to us, or to all processes."""
        self._check_signals()
        ended = (REQUEUE, *(-number for number in WARNINGS))
        codes = [child.exit_code() for child in self._supervisor.failed()]
        if REQUEUE in codes or (self._warned and all(code in ended for code in codes)):
            end = time.monotonic() + GRACE
            while REQUEUE in codes and self._running() and time.monotonic() < end:
                self._progress.pump(0.1)
                self._check_nodes()
            raise Interrupted(self._signals.number or signal.SIGTERM, requeue=True)

    def _check_nodes(self) -> None:
        """Take in what other nodes tell. Raises UserError or RunFailed if one of them fails or is lost."""
        if self._team is None:
            return
        try:
            self._team.pump()
        except RunFailed as e:
            raise RunFailed(self._keep(str(e))) from None

    def _check_children(self) -> None:
        if not self._supervisor.failed():
            early = [c for c in self._supervisor.children if c not in self._ranks and c.exit_code() == 0]
            if early and self._running() and not self._warned:
                time.sleep(1.0)
                self._check_signals()
                if not self._warned:
                    raise RunFailed(self._keep(explain(early[0])))
            return
        time.sleep(1.0)  # those that the first one takes along: one of them may know more
        self._progress.pump(0.0)  # a step that ended just before is one that the folder tells of
        self._check_nodes()
        self._check_stopped()
        dead = self._supervisor.failed()[0]
        message = user_error(dead)
        if message is None:
            if not self._most_restarts:
                # It may be what an engine's death led to, which leaves its main process alive for seconds.
                self._check_engines(closely=True)
            raise RunFailed(self._keep(explain(dead)))
        if self._progress.started_training or not self._opened.made:
            raise UserError(self._keep(message))
        self._discard = True  # the folder says no more than the message
        raise UserError(message)

    def _check_engines(self, closely: bool = False) -> None:
        for engine in self._engines:
            if engine.index in self._waiting:
                if not is_trainers_turn(self._workspace.work):
                    self._start_again(engine)
                continue
            reason = take_request(self._workspace.work, engine.index, self._restarts[engine.index])
            # The exit code says nothing (a dead engine exits with 0), so it is not shown.
            if engine.index in self._healthy and (
                not engine.alive() or (closely and not engine.healthy(timeout=5.0))
            ):
                reason = reason or f"engine {engine.index} died"
            if reason:
                time.sleep(0.5)  # it may have been a signal to all processes, of which we are one
                self._check_signals()
                if self._warned:
                    return
                self._restart(engine, reason)
        if len(self._healthy) < len(self._engines) and time.monotonic() - self._probed > _PROBE_SECONDS:
            self._probe()

    def _restart(self, engine: EngineProcess | RemoteEngine, reason: str) -> None:
        """Start an engine anew, in the same log. Raises RunFailed if that was done too often already."""
        index, done, most = engine.index, self._restarts[engine.index], self._most_restarts
        if done >= most:
            limit = f" (restarted {done} of {most} times before: engine.restarts)" if most else ""
            end = f"the end of {shown(engine.log)}:\n{tail(engine.log)}"
            raise RunFailed(self._keep(f"{reason}{limit}; {end}"))
        self._progress.status(f"warning: {reason}; restart {done + 1} of {most}; log: {shown(engine.log)}")
        was_up = index in self._healthy or has_answered(self._workspace.work, index, done)
        self._healthy.discard(index)
        engine.stop(grace=0)
        with engine.log.open("a", encoding="utf-8") as log:
            log.write(f"---- {reason}; restart {done + 1} of {most} ----\n")
        self._restarts[index] = done + 1
        # The sampler lets nobody have the GPUs while an engine is starting, so that one may go on trying.
        if was_up and is_trainers_turn(self._workspace.work):
            self._waiting.add(index)
        else:
            self._start_again(engine)

    def _start_again(self, engine: EngineProcess | RemoteEngine) -> None:
        self._waiting.discard(engine.index)
        begin_incarnation(self._workspace.work, engine.index, self._restarts[engine.index])
        engine.start()
        self._adopt(engine)
        self._started[engine.index] = time.monotonic()

    def _probe(self) -> None:
        self._probed = time.monotonic()
        for engine in self._engines:
            if engine.index in self._healthy | self._waiting:
                continue
            seconds = self._probed - self._started[engine.index]
            incarnation = self._restarts[engine.index]
            if not engine.alive() and has_answered(self._workspace.work, engine.index, incarnation):
                self._restart(engine, f"engine {engine.index} died")
                continue
            try:
                if seconds > self._settings.engine.start_timeout or not engine.alive():
                    engine.wait_healthy()  # raises, with the end of the log
                elif not engine.healthy(timeout=2.0):
                    continue
            except UserError as e:
                if not incarnation:
                    raise UserError(self._keep(str(e))) from None
                self._restart(engine, str(e).partition("; the end of")[0])
                continue
            self._healthy.add(engine.index)
            # Known to the guardian now: when the launcher is gone, the workers' maps may be gone as well.
            for segment in process_groups.leftover_segments([engine.pid] if engine.pid else []):
                self._guardian.guard_path(segment)
            self._progress.status(f"engine {engine.index} is up after {seconds:.0f} s")

    def _keep(self, message: str) -> str:
        return f"{message}\nthe run's folder stays: {shown(self.folder)}"

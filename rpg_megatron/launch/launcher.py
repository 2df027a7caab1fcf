"""One run from start to end: engines, sampler and trainer ranks as processes, watched until they are done."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

from rpg_megatron.config import Settings, UserError
from rpg_megatron.launch.environment import record_environment
from rpg_megatron.launch.guardian import Guardian
from rpg_megatron.launch.preflight import check
from rpg_megatron.launch.progress import Progress
from rpg_megatron.launch.report import write_report
from rpg_megatron.launch.resuming import open_run
from rpg_megatron.launch.run_directory import LOGS, METRICS
from rpg_megatron.launch.summary import shown, summarise
from rpg_megatron.launch.supervision import (
    Child,
    Interrupted,
    StopSignals,
    Supervisor,
    explain,
    tail,
    user_error,
)
from rpg_megatron.launch.workspace import create_workspace
from rpg_megatron.rollout import processes
from rpg_megatron.rollout.engine import TOKEN_VARIABLE, EngineProcess, engine_socket
from rpg_megatron.rollout.lives import begin_life, take_request

SAMPLER = "rpg_megatron.rollout.sampler"
RANK = "rpg_megatron.training.rank"
GRACE = 15.0
"""Seconds that children have to leave after SIGTERM."""
_PROBE_SECONDS = 0.5


class RunFailed(Exception):
    """A child ended before its time and not because of the user's input; the message explains it."""


def train(
    settings: Settings, signals: StopSignals, *, fresh: bool = False, source: Path | None = None
) -> Path:
    """Check the settings, open the run, run it to its end and print a summary. Returns the run's folder.

    fresh: do not go on with an unfinished run of this name. source: a checkpoint to start a new run from.
    Raises UserError for what the user can mend, RunFailed if a process died, Interrupted after a signal. In
    every case no process and no folder but the run's own is left, and that one only if it tells something.
    """
    check(settings)
    signals.raising = False  # from here on there is something to clean up
    with Run(settings, signals, fresh=fresh, source=source) as run:
        try:
            record_environment(run.folder)
            run.start()
            run.watch()
        except Interrupted as e:
            e.note = f"the run's folder stays: {shown(run.folder)}"
            raise
    _report(run.folder)
    print(summarise(run.folder), flush=True)
    return run.folder


def _report(folder: Path) -> None:
    """Write the run's report."""
    try:
        write_report([folder])
    except Exception as e:  # whatever it is, the run has ended well
        print(f"warning: no report was written: {e!r}", flush=True)


class Run:
    """Everything that a run holds while it is under way; leaving the context gives it all back.

    job: what the ranks do, see ``training/rank.py``. engine_settings: the engines' settings, where they are
    not the run's. fresh, source: see ``train``.
    """

    def __init__(
        self,
        settings: Settings,
        signals: StopSignals,
        *,
        job: str = "train",
        engine_settings: Settings | None = None,
        fresh: bool = False,
        source: Path | None = None,
    ):
        self._settings = settings
        self._engine_settings = engine_settings or settings
        self._job = job
        self._signals = signals
        self._opened = open_run(settings, fresh=fresh, source=source)
        self.folder = self._opened.folder
        self._ranks: list[Child] = []
        self._engines: list[EngineProcess] = []
        self._healthy: set[int] = set()
        # Only training goes on with an engine that comes back; elsewhere its weights would be random.
        self._most_restarts = settings.engine.restarts if job == "train" else 0
        self._restarts: dict[int, int] = {}
        self._started: dict[int, float] = {}
        self._discard = False
        self._probed = time.monotonic()
        try:
            self._guardian = Guardian()
            self._workspace = create_workspace()
            self._guardian.guard_path(self._workspace.work)
            self._guardian.guard_path(self._workspace.bridge)
            self._progress = Progress(
                self._workspace.work,
                steps=settings.training.steps if job == "train" else 0,
                metrics=self.folder / METRICS,
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

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # whatever the terminal does, the processes must end
            self._progress.close()
        seen = self._signals.count
        self._supervisor.stop(GRACE, hurry=lambda: self._signals.count > seen)
        self._workspace.remove()
        if self._discard:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._opened.close()
        self._guardian.dismiss()

    def start(self) -> None:
        """Start all processes at once: each spends its first seconds importing."""
        settings, work, bridge = self._settings, self._workspace.work, self._workspace.bridge
        token = secrets.token_urlsafe(32)
        for note in self._opened.notes or [f"run {shown(self.folder)}"]:
            self._progress.status(note)
        self._progress.status(
            f"starting (takes about a minute): engines {settings.engine.replicas}, "
            f"trainer ranks {settings.parallel.world}"
        )
        for index in range(settings.engine.replicas):
            self._signals.check()
            engine = EngineProcess(
                self._engine_settings,
                index,
                socket=engine_socket(work, index),
                log=self.folder / LOGS / f"engine_{index}.log",
                bridge_dir=bridge,
                token=token,
            )
            engine.start()
            self._supervisor.adopt(engine)
            self._engines.append(engine)
            self._started[index], self._restarts[index] = time.monotonic(), 0
        places = [str(self.folder), str(work), str(bridge)]
        self._signals.check()
        sampler = [sys.executable, "-m", SAMPLER, *places]
        self._supervisor.start("sampler", sampler, self._environment(token))
        world, port = settings.parallel.world, settings.rendezvous_port or _free_port()
        for rank in range(world):
            self._signals.check()
            environment = self._environment(token if rank == 0 else "") | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this node; gloo would pick by host name
            }
            command = [sys.executable, "-m", RANK, *places, self._job]
            if self._opened.checkpoint is not None:
                command.append(str(self._opened.checkpoint))
            self._ranks.append(self._supervisor.start(f"rank_{rank}", command, environment))

    def watch(self) -> None:
        """Return when all ranks have ended well. Raises UserError, RunFailed or Interrupted."""
        while any(rank.exit_code() is None for rank in self._ranks):
            self._progress.pump(0.2)
            self._signals.check()
            self._check_children()
            self._check_engines()
        self._check_children()

    def _check_children(self) -> None:
        if not self._supervisor.failed():
            running = any(rank.exit_code() is None for rank in self._ranks)
            early = [c for c in self._supervisor.children if c not in self._ranks and c.exit_code() == 0]
            if early and running:
                raise RunFailed(self._keep(explain(early[0])))
            return
        time.sleep(1.0)  # those that the first one takes along: one of them may know more
        self._progress.pump(0.0)  # a step that ended just before is one that the folder tells of
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
            asked = take_request(self._workspace.work, engine.index, self._restarts[engine.index])
            if asked:
                self._restart(engine, asked)
            # The exit code says nothing (a dead engine exits with 0), so it is not shown.
            elif engine.index in self._healthy and (
                not engine.alive() or (closely and not engine.healthy(timeout=5.0))
            ):
                self._restart(engine, f"engine {engine.index} died")
        if len(self._healthy) < len(self._engines) and time.monotonic() - self._probed > _PROBE_SECONDS:
            self._probe()

    def _restart(self, engine: EngineProcess, reason: str) -> None:
        """Start an engine anew, in the same log. Raises RunFailed if that was done too often already."""
        index, done, most = engine.index, self._restarts[engine.index], self._most_restarts
        if done >= most:
            limit = f" (restarted {done} of {most} times before: engine.restarts)" if most else ""
            end = f"the end of {shown(engine.log)}:\n{tail(engine.log)}"
            raise RunFailed(self._keep(f"{reason}{limit}; {end}"))
        self._progress.status(f"warning: {reason}; restart {done + 1} of {most}; log: {shown(engine.log)}")
        self._healthy.discard(index)
        engine.stop(grace=0)
        with engine.log.open("a", encoding="utf-8") as log:
            log.write(f"---- {reason}; restart {done + 1} of {most} ----\n")
        self._restarts[index] = done + 1
        begin_life(self._workspace.work, index, done + 1)
        engine.start()
        self._supervisor.adopt(engine)
        self._started[index] = time.monotonic()

    def _probe(self) -> None:
        self._probed = time.monotonic()
        for engine in self._engines:
            if engine.index in self._healthy:
                continue
            seconds = self._probed - self._started[engine.index]
            try:
                if seconds > self._settings.engine.start_timeout or not engine.alive():
                    engine.wait_healthy()  # raises, with the end of the log
                elif not engine.healthy(timeout=2.0):
                    continue
            except UserError as e:
                if not self._restarts[engine.index]:
                    raise UserError(self._keep(str(e))) from None
                self._restart(engine, str(e).partition("; the end of")[0])
                continue
            self._healthy.add(engine.index)
            # Known to the guardian now: when the launcher is gone, the workers' maps may be gone as well.
            for segment in processes.leftover_segments([engine.pid] if engine.pid else []):
                self._guardian.guard_path(segment)
            self._progress.status(f"engine {engine.index} is up after {seconds:.0f} s")

    def _keep(self, message: str) -> str:
        return f"{message}\nthe run's folder stays: {shown(self.folder)}"

    def _environment(self, token: str) -> dict[str, str]:
        environment = os.environ | {TOKEN_VARIABLE: token}  # not on a command line, which all users can read
        if self._settings.device == "cpu":
            # Ranks share the cores; more threads than cores wait for each other in every matrix product.
            cores = len(os.sched_getaffinity(0))
            environment["OMP_NUM_THREADS"] = str(max(1, cores // self._settings.parallel.world))
        return environment


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The engines of a run, on all nodes: start, health checks, sleep, restarts, stop.

Slow operations run on all engines at the same time: there may be hundreds, and each may take seconds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import open_own
from rpg_megatron.engine.command import RUNNER_VARIABLE
from rpg_megatron.engine.process import (
    EngineProcess,
    call_all,
    cause_of_death,
    note_segments,
    refused_arguments,
    stop_engines,
)
from rpg_megatron.engine.restarts import (
    begin_incarnation,
    has_answered,
    is_trainers_turn,
    set_gpu_owner,
    take_request,
)
from rpg_megatron.launcher.failures import Failure, judge_engine, own_host
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.remote_nodes import RemoteEngine, RemoteNodes
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.launcher.supervisor import RunFailed, Supervisor
from rpg_megatron.system.child import tail_of
from rpg_megatron.system.limits import explain_limits

_PROBE_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_LONG_ANSWER_SECONDS = 5.0
"""Time limit for the answer of an engine that may be dying."""
_VARIES = re.compile(r"(?:0x)?[0-9a-f]*\d[0-9a-f]*", re.IGNORECASE)
"""What may differ in two messages of the same error: process ids, addresses, sizes, ids of requests."""


class Engines:
    """All engines of a run.

    restarts: how often each may be restarted. work: the folder shared with the sampler. remote: the other
    nodes, if any.
    """

    def __init__(
        self,
        settings: Settings,
        work: Path,
        supervisor: Supervisor,
        progress: Progress,
        *,
        restarts: int,
        remote: RemoteNodes | None = None,
    ):
        self._start_timeout, self._max_restarts = settings.engine.start_timeout, restarts
        self._work, self._supervisor, self._progress, self._remote = work, supervisor, progress, remote
        self._engines: list[EngineProcess | RemoteEngine] = []
        self._healthy: set[int] = set()
        self._restarts: dict[int, int] = {}
        self._deferred: set[int] = set()
        """Engines that are restarted when the ranks release the shared GPUs."""
        self._started: dict[int, float] = {}
        self._log_starts: dict[int, int] = {}
        """Where in its log an engine's last start begins, in bytes; once it is up, where its work begins."""
        self._deaths: dict[int, tuple[str, int]] = {}
        """How and after which step an engine died last, if its log tells how."""
        self._probed = time.monotonic()
        self._may_fall_back = settings.device == "cuda" and RUNNER_VARIABLE not in os.environ
        self._fell_back: set[int] = set()
        """Engines that use vLLM's model runner V1, because they did not start with V2."""

    @property
    def all_up(self) -> bool:
        """Whether every engine has answered since its last start."""
        return len(self._healthy) == len(self._engines)

    def start(self, engine: EngineProcess | RemoteEngine) -> None:
        """Start an engine, without waiting for it."""
        self._log_starts[engine.index] = _size(engine.log)
        engine.start()
        if isinstance(engine, EngineProcess):
            self._supervisor.adopt(engine)
        if engine not in self._engines:
            self._engines.append(engine)
        self._restarts.setdefault(engine.index, 0)
        self._started[engine.index] = time.monotonic()

    def sleep(self) -> None:
        """Put all engines to sleep, which frees their GPU memory; all must be up. Raises RunFailed."""

        def sleep(engine: EngineProcess | RemoteEngine) -> str | None:
            try:
                engine.sleep()
            except RuntimeError as e:
                return f"engine {engine.index} {e}; {_end_of(engine)}"
            return None

        if failures := [failure for failure in call_all(self._engines, sleep) if failure]:
            raise RunFailed(failures[0])
        set_gpu_owner(self._work, trainers=True)

    def stop(self, grace: float) -> None:
        """End all engines. grace: seconds from SIGTERM to SIGKILL."""
        self._stop(self._engines, grace)

    def check(self, run_ends: Callable[[], bool], *, closely: bool = False) -> None:
        """Restart engines that failed, and check whether starting ones are up.

        run_ends: whether the run is ending; may raise. closely: also probe engines whose process is alive.
        Raises UserError if an engine does not start, RunFailed if one failed too often.
        """
        unresponsive = self._unresponsive() if closely else ()
        failed: dict[int, str] = {}
        for engine in self._engines:
            index = engine.index
            if index in self._deferred:
                continue
            reason = take_request(self._work, index, self._restarts[index])
            # A dead engine exits with code 0, so the exit code is not shown.
            if index in self._healthy and (not engine.alive() or index in unresponsive):
                reason = reason or f"engine {index} died"
            if reason:
                failed[index] = reason
        if self._deferred and not is_trainers_turn(self._work):
            for engine in [e for e in self._engines if e.index in self._deferred]:
                self._start_incarnation(engine)
        if failed:
            time.sleep(0.5)  # the cause may be a signal to all processes, which ends the run
            if run_ends():
                return
            self._restart(failed)
        if not self.all_up and time.monotonic() > self._probed + _PROBE_SECONDS:
            self._probe(run_ends)

    def _unresponsive(self) -> Collection[int]:
        """Indices of engines that were up and do not answer."""
        probed = [e for e in self._engines if e.index in self._healthy and e.alive()]
        answers = call_all(probed, lambda e: e.healthy(_LONG_ANSWER_SECONDS))
        return {engine.index for engine, ok in zip(probed, answers, strict=True) if not ok}

    def _restart(self, failed: dict[int, str]) -> None:
        """Restart engines, which append to their logs. failed: index -> reason. Raises RunFailed if the limit
        of restarts is reached, or if an engine died twice of the same error without a step in between.
        """
        engines = [engine for engine in self._engines if engine.index in failed]
        was_up = set()
        for engine in engines:
            index, reason, most = engine.index, failed[engine.index], self._max_restarts
            done = self._restarts[index]
            if (cause := self._note_death(engine)) is not None and cause not in reason:
                reason = failed[index] = f"{reason}: {cause}"
            if done >= most:
                limit = f" (already restarted {done} of {most} times: engine.restarts)" if most else ""
                raise RunFailed(f"{reason}{limit}; {_end_of(engine)}", self._judge(reason, engine))
            self._progress.status(
                f"warning: {reason}; restart {done + 1} of {most}; log: {display_path(engine.log)}"
            )
            if index in self._healthy or has_answered(self._work, index, done):
                was_up.add(index)
            self._healthy.discard(index)
        self._stop(engines, 0.0)
        for engine in engines:
            done = self._restarts[engine.index]
            engine.log.parent.mkdir(exist_ok=True)  # it may have been deleted during the run
            with open_own(engine.log, "a", encoding="utf-8") as log:
                log.write(f"---- {failed[engine.index]}; restart {done + 1} of {self._max_restarts} ----\n")
            self._restarts[engine.index] = done + 1
            # An engine that was still starting may retry at once: the sampler waits for it before it gives
            # the GPUs to the ranks.
            if engine.index in was_up and is_trainers_turn(self._work):
                self._deferred.add(engine.index)
            else:
                self._start_incarnation(engine)

    def _note_death(self, engine: EngineProcess | RemoteEngine) -> str | None:
        """What an engine died of, if its log tells. Raises RunFailed if the one before died of the same and
        no step was completed since: then the next would die of it too.
        """
        index, step = engine.index, self._progress.step
        cause = cause_of_death(engine.log, self._log_starts[index], engine.opened)
        before = self._deaths.pop(index, None)
        if cause is None:
            return None
        self._deaths[index] = (_VARIES.sub("#", cause), step)
        if before == self._deaths[index] and self._max_restarts:
            limits = explain_limits(tail_of(engine.log, opened=engine.opened))
            raise RunFailed(
                f"engine {index} died twice of the same error, without a step in between, and is not "
                f"restarted again: {cause}; a new engine would get the same requests: correct what the error "
                f"names (model, prompts, engine.arguments); log: {display_path(engine.log)}{limits}"
            )
        return cause

    def _start_incarnation(self, engine: EngineProcess | RemoteEngine) -> None:
        self._deferred.discard(engine.index)
        begin_incarnation(self._work, engine.index, self._restarts[engine.index])
        self.start(engine)

    def _stop(self, engines: Sequence[EngineProcess | RemoteEngine], grace: float) -> None:
        others = [engine for engine in engines if isinstance(engine, RemoteEngine)]
        if self._remote:
            self._remote.send_stop(others, grace)
        stop_engines([engine for engine in engines if isinstance(engine, EngineProcess)], grace)
        if self._remote:
            self._remote.wait_stopped(others)

    def _probe(self, run_ends: Callable[[], bool]) -> None:
        """Probe starting engines. Those that ended or took too long are restarted, or raise UserError.

        run_ends: see ``check``.
        """
        starting = [e for e in self._engines if e.index not in self._healthy | self._deferred]
        since = {e.index: time.monotonic() - self._started[e.index] for e in starting}
        probed = [e for e in starting if since[e.index] <= self._start_timeout and e.alive()]
        sizes = {e.index: _size(e.log) for e in probed}
        answers = call_all(probed, lambda e: e.healthy(_ANSWER_SECONDS))
        note_segments(e for e in probed if isinstance(e, EngineProcess))
        up = [engine for engine, ok in zip(probed, answers, strict=True) if ok]
        if len(probed) < len(starting):
            time.sleep(0.5)  # as in ``check``
            if run_ends():
                return
        failed = {}
        for engine in starting:
            if engine not in probed and (up or not self._fall_back(engine)):
                if reason := self._failed_start(engine):
                    failed[engine.index] = reason
                else:
                    up.append(engine)
        for engine in up:
            self._healthy.add(engine.index)
            self._log_starts[engine.index] = sizes.get(engine.index, self._log_starts[engine.index])
            self._progress.status(f"engine {engine.index} is up after {since[engine.index]:.0f} s")
        self._supervisor.guard_shared_memory([e for e in up if isinstance(e, EngineProcess)])
        if failed:
            self._restart(failed)
        self._probed = time.monotonic()

    def _fall_back(self, engine: EngineProcess | RemoteEngine) -> bool:
        """Start an engine once more, with vLLM's model runner V1, if it ended before its first answer and no
        engine is up: V2 is new, and the default on a GPU. Returns whether it was started.
        """
        index = engine.index
        first = not self._healthy and not self._restarts[index] and not has_answered(self._work, index, 0)
        if not self._may_fall_back or not first or index in self._fell_back or engine.alive():
            return False
        if refused_arguments(engine.log, engine.opened):
            return False
        self._fell_back.add(index)
        cause = cause_of_death(engine.log, self._log_starts[index], engine.opened)
        why = f"ended while starting{f': {cause}' if cause else ''}"
        how = f"starting it once more with vLLM's model runner V1 ({RUNNER_VARIABLE}=0)"
        self._progress.status(f"warning: engine {index} {why}; {how}; log: {display_path(engine.log)}")
        self._stop([engine], 0.0)
        engine.use_runner_v1()
        self.start(engine)
        return True

    def _failed_start(self, engine: EngineProcess | RemoteEngine) -> str | None:
        """Why an engine ended or took too long to start; None if it is up now. Raises UserError at its first
        start, where the settings may be wrong; RunFailed if the machine is.
        """
        incarnation = self._restarts[engine.index]
        if not engine.alive() and has_answered(self._work, engine.index, incarnation):
            return f"engine {engine.index} died"
        try:
            engine.wait_healthy()  # raises, with the end of the log
        except UserError as e:
            reason = str(e).partition("; the end of")[0]
            if not incarnation:
                if (failure := self._judge(reason, engine)).machine:
                    raise RunFailed(str(e), failure) from None
                raise
            return reason
        return None

    def _judge(self, reason: str, engine: EngineProcess | RemoteEngine) -> Failure:
        host = engine.host if isinstance(engine, RemoteEngine) else own_host()
        return judge_engine(reason, engine.log, engine.opened, host, self._log_starts[engine.index])


def _size(log: Path) -> int:
    """Bytes of a log; 0 without one."""
    return log.stat().st_size if log.exists() else 0


def _end_of(engine: EngineProcess | RemoteEngine) -> str:
    tail = tail_of(engine.log, opened=engine.opened)
    return f"the end of {display_path(engine.log)}:\n{tail}{explain_limits(tail)}"

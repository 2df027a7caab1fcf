"""The engines of a run, on all nodes: start, health checks, sleep, restarts, stop.

Slow operations run on all engines at the same time: there may be hundreds, and each may take seconds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rpg_megatron.config import Settings
from rpg_megatron.config.files import open_own
from rpg_megatron.engine.command import RUNNER_VARIABLE
from rpg_megatron.engine.process import call_all, cause_of_death, put_to_sleep, refused_arguments, start_error
from rpg_megatron.engine.restarts import (
    begin_incarnation,
    has_answered,
    is_trainers_turn,
    set_gpu_owner,
    take_request,
)
from rpg_megatron.launcher.cluster import Cluster, Engine, log_size
from rpg_megatron.launcher.failures import judge_engine
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.stopping import RunFailed
from rpg_megatron.launcher.summary import display_path
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

    restarts: how often each may be restarted. work: the folder shared with the sampler.
    """

    def __init__(
        self, settings: Settings, work: Path, cluster: Cluster, progress: Progress, *, restarts: int
    ):
        self._start_timeout, self._max_restarts = settings.engine.start_timeout, restarts
        self._work, self._cluster, self._progress = work, cluster, progress
        self._all: list[Engine] = []
        """Those that were started."""
        self._probed = time.monotonic()
        self._may_fall_back = settings.device == "cuda" and RUNNER_VARIABLE not in os.environ

    @property
    def all_up(self) -> bool:
        """Whether every engine has answered since its last start."""
        return all(engine.is_up for engine in self._all)

    def start(self) -> None:
        """Start all engines, without waiting for them."""
        self._all = list(self._cluster.engines.values())
        for engine in self._all:
            engine.start()

    def sleep(self) -> None:
        """Put all engines to sleep, which frees their GPU memory; all must be up. Raises RunFailed."""

        def sleep(engine: Engine) -> str | None:
            try:
                put_to_sleep(engine.address, engine.token)
            except RuntimeError as e:
                return f"engine {engine.index} {e}; {_end_of(engine)}"
            return None

        if failures := [failure for failure in call_all(self._all, sleep) if failure]:
            raise RunFailed(failures[0])
        set_gpu_owner(self._work, trainers=True)

    def stop(self, grace: float) -> None:
        """End all engines. grace: seconds from SIGTERM to SIGKILL."""
        self._stop(self._all, grace)

    def check(self, run_ends: Callable[[], bool], *, closely: bool = False) -> None:
        """Restart engines that failed, and check whether starting ones are up. ``Cluster.pump`` before.

        run_ends: whether the run is ending; may raise. closely: also probe engines whose process is alive.
        Raises UserError if an engine does not start, RunFailed if one failed too often.
        """
        up = [engine for engine in self._all if engine.is_up and engine.runs]
        silent = set(up) - set(_answering(up, _LONG_ANSWER_SECONDS)) if closely else set()
        failed: dict[int, str] = {}
        for engine in self._all:
            if engine.is_deferred:
                continue
            reason = take_request(self._work, engine.index, engine.incarnation)
            # A dead engine exits with code 0, so the exit code is not shown.
            if engine.is_up and (not engine.runs or engine in silent):
                reason = reason or f"engine {engine.index} died"
            if reason:
                failed[engine.index] = reason
        if not is_trainers_turn(self._work):
            for engine in self._all:
                if engine.is_deferred:
                    self._start_incarnation(engine)
        if failed:
            time.sleep(0.5)  # the cause may be a signal to all processes, which ends the run
            if run_ends():
                return
            self._restart(failed)
        if not self.all_up and time.monotonic() > self._probed + _PROBE_SECONDS:
            self._probe(run_ends)

    def _restart(self, failed: dict[int, str]) -> None:
        """Restart engines, which append to their logs. failed: index -> reason. Raises RunFailed if the limit
        of restarts is reached, or if an engine died twice of the same error without a step in between.
        """
        engines = [engine for engine in self._all if engine.index in failed]
        was_up = set()
        for engine in engines:
            index, done, most = engine.index, engine.incarnation, self._max_restarts
            reason = failed[index]
            if (cause := self._note_death(engine)) is not None and cause not in reason:
                reason = failed[index] = f"{reason}: {cause}"
            if engine.others and engine.failed:
                reason = failed[index] = f"{reason}; it failed on {engine.suspect.node or 'node 0'}"
            if done >= most:
                limit = f" (already restarted {done} of {most} times: engine.restarts)" if most else ""
                raise RunFailed(f"{reason}{limit}; {_end_of(engine)}", judge_engine(reason, engine.suspect))
            log = display_path(engine.suspect.log)
            self._progress.status(f"warning: {reason}; restart {done + 1} of {most}; log: {log}")
            if engine.is_up or has_answered(self._work, index, done):
                was_up.add(index)
            engine.is_up = False
        self._stop(engines, 0.0)
        for engine in engines:
            engine.incarnation += 1
            engine.process.log.parent.mkdir(exist_ok=True)  # it may have been deleted during the run
            number = f"restart {engine.incarnation} of {self._max_restarts}"
            for process in engine.processes:
                with open_own(process.log, "a", encoding="utf-8") as file:
                    file.write(f"---- {failed[engine.index]}; {number} ----\n")
            # An engine that was still starting may retry at once: the sampler waits for it before it gives
            # the GPUs to the ranks.
            if engine.index in was_up and is_trainers_turn(self._work):
                engine.is_deferred = True
            else:
                self._start_incarnation(engine)

    def _note_death(self, engine: Engine) -> str | None:
        """What an engine died of, if its log tells. Raises RunFailed if the one before died of the same and
        no step was completed since: then the next would die of it too.
        """
        cause = cause_of_death(engine.suspect)
        before, engine.death = engine.death, None
        if cause is None:
            return None
        engine.death = (_VARIES.sub("#", cause), self._progress.step)
        if before == engine.death and self._max_restarts:
            limits = explain_limits(tail_of(engine.suspect.log, opened=engine.suspect.opened))
            raise RunFailed(
                f"engine {engine.index} died twice of the same error, without a step in between, and is not "
                f"restarted again: {cause}; a new engine would get the same requests: correct what the error "
                f"names (model, prompts, engine.arguments); log: {display_path(engine.suspect.log)}{limits}"
            )
        return cause

    def _start_incarnation(self, engine: Engine) -> None:
        begin_incarnation(self._work, engine.index, engine.incarnation)
        engine.start()

    def _stop(self, engines: Sequence[Engine], grace: float) -> None:
        """End engines, all at the same time. Raises RunFailed if a node is lost."""
        # Other nodes first: a request to this one returns when it is done.
        parts = [(process, engine.index) for engine in engines for process in engine.processes]
        parts.sort(key=lambda part: not part[0].node)
        for agent in {id(process.agent): process.agent for process, _ in parts}.values():
            indices = [index for process, index in parts if process.agent is agent]
            agent.send("stop_engines", indices=indices, grace=grace)
        self._cluster.pump()
        while any(len(engine.ended) < len(engine.processes) for engine in engines):
            time.sleep(0.05)
            self._cluster.pump()

    def _probe(self, run_ends: Callable[[], bool]) -> None:
        """Probe starting engines. Those that ended or took too long are restarted, or raise UserError.

        run_ends: see ``check``.
        """
        starting = [engine for engine in self._all if not engine.is_up and not engine.is_deferred]
        probed = [engine for engine in starting if engine.seconds <= self._start_timeout and engine.runs]
        sizes = {engine.index: log_size(engine.process.log) for engine in probed}
        up = _answering(probed, _ANSWER_SECONDS)
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
            engine.is_up = True
            if engine.index in sizes:
                engine.process.log_start = sizes[engine.index]  # where its work begins
            for process in engine.processes:
                process.agent.send("engine_is_up", index=engine.index)
            self._progress.status(f"engine {engine.index} is up after {engine.seconds:.0f} s")
        if failed:
            self._restart(failed)
        self._probed = time.monotonic()

    def _fall_back(self, engine: Engine) -> bool:
        """Start an engine once more, with vLLM's model runner V1, if it ended before its first answer and no
        engine is up: V2 is new, and the default on a GPU. Returns whether it was started.
        """
        first = not any(e.is_up for e in self._all) and not engine.incarnation
        if not self._may_fall_back or not first or engine.runner_v1 or engine.runs:
            return False
        if has_answered(self._work, engine.index, 0) or refused_arguments(engine.process):
            return False
        cause = cause_of_death(engine.suspect)
        why = f"ended while starting{f': {cause}' if cause else ''}"
        how = f"starting it once more with vLLM's model runner V1 ({RUNNER_VARIABLE}=0)"
        log = display_path(engine.suspect.log)
        self._progress.status(f"warning: engine {engine.index} {why}; {how}; log: {log}")
        self._stop([engine], 0.0)
        engine.runner_v1 = True
        engine.start()
        return True

    def _failed_start(self, engine: Engine) -> str | None:
        """Why an engine ended or took too long to start; None if it is up now. Raises UserError at its first
        start, where the settings may be wrong; RunFailed if the machine is.
        """
        if not engine.runs and has_answered(self._work, engine.index, engine.incarnation):
            return f"engine {engine.index} died"
        problem = "ended while starting"
        if engine.runs:
            if engine.healthy():
                return None
            problem = f"did not answer within {self._start_timeout:.0f} s (engine.start_timeout)"
        suspect = engine.suspect
        self._stop([engine], 2.0)
        error = start_error(suspect.name.replace("_", " "), problem, suspect)
        reason = str(error).partition("; the end of")[0]
        if not engine.incarnation:
            if (failure := judge_engine(reason, suspect)).machine:
                raise RunFailed(str(error), failure)
            raise error
        return reason


def _answering(engines: Sequence[Engine], timeout: float) -> list[Engine]:
    answers = call_all(engines, lambda engine: engine.healthy(timeout))
    return [engine for engine, ok in zip(engines, answers, strict=True) if ok]


def _end_of(engine: Engine) -> str:
    tail = tail_of(engine.suspect.log, opened=engine.suspect.opened)
    return f"the end of {display_path(engine.suspect.log)}:\n{tail}{explain_limits(tail)}"

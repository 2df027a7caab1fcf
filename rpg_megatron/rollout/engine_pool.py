"""The pool of vLLM engines: weight version and health of each, sync, sleep and wake, restarts.

An engine that fails (dead, hung, or with a mixture of weights) is reported to the launcher, which restarts
it. A restarted engine has random weights, so it gets no request before it is synced again. For that the
trainers must publish again: the sampler answers rank 0 with ``sampler_client.ResyncRequired``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rpg_megatron.bridge.controller import CheckFailed, SyncError, SyncReport, sync_engine
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config.rollout import EngineSettings
from rpg_megatron.engine.client import EngineClient, EngineError
from rpg_megatron.engine.restarts import ask_restart, incarnation_of, note_answer, set_gpu_owner
from rpg_megatron.rollout.engine_load import EngineLoad, EngineTimeline, append_rows, summarise
from rpg_megatron.rollout.sampler_client import SyncResult
from rpg_megatron.system.tasks import run_all
from rpg_megatron.system.timeline import TIMELINE, Timeline

logger = logging.getLogger("rpg_megatron.sampler")

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 2.0
_PROBES_PER_SECOND = 32
"""Limit for all engines together, so that probing many engines does not slow this process down."""
_MIN_PROBE_SECONDS = 0.5
_LATE_SECONDS = 10.0
"""If a timeout expires this much too late, this process itself was stopped, and an answer may be waiting."""
_RESTART_WAIT_SECONDS = 0.3
"""How long a sync waits for a restarting engine, which may already be ready."""


class PooledEngine:
    """One engine, across its restarts."""

    def __init__(self, client: EngineClient):
        self.client = client
        self.incarnation = 0
        """Number of the engine process (0, then one more per restart) that the fields below describe."""
        self.version: int | None = None
        """Version of the weights that it serves; None: unknown or random."""
        self.serving = asyncio.Event()
        """Set while it serves the weights of the step."""
        self.restart: asyncio.Task[None] | None = None
        """Done when a failed engine answers again, without weights. None if it never failed."""
        self.watch: asyncio.Task[None] | None = None
        self.load = 0
        """Number of responses that are requested from it now."""
        self.usage = EngineLoad()
        self.link_timeout = 0.0
        """During a sync: how long it may wait for a message from a trainer, in seconds."""

    @property
    def index(self) -> int:
        """Index of the engine, from 0."""
        return self.client.index

    @property
    def is_restarting(self) -> bool:
        """Whether it has failed and not been restarted yet."""
        return self.restart is not None and not self.restart.done()

    @property
    def needs_weights(self) -> bool:
        """Whether it was restarted and has not been synced yet."""
        return self.restart is not None and self.restart.done() and not self.serving.is_set()


class EnginePool:
    """All engines of a run. Call its methods from one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        clients: Sequence[EngineClient],
        work: Path,
        usage_file: Path | None = None,
        *,
        interrupt: bool = False,
    ):
        """work: the folder shared with the launcher. usage_file: file for a line per engine and step; the
        timeline is in the same folder. interrupt: a sync ends running requests; otherwise there must be none.
        """
        self.engines = [PooledEngine(client) for client in clients]
        self.version: int | None = None
        """Version that the engines should serve; None before the first sync."""
        self.restarted = asyncio.Event()
        """Set when an engine has restarted and needs weights."""
        self.dispatch_needed = asyncio.Event()
        """Set when the dispatcher should look for a free engine: one starts to serve the weights of the step,
        a group is queued, or an engine has finished one."""
        self.resent = 0
        """Number of requests that were resent."""
        self.on_synced: Callable[[PooledEngine, int], None] = lambda engine, version: None
        """Called for each engine after it has loaded new weights, before it gets requests."""
        self._settings, self._interrupt = settings, interrupt
        self._work, self._usage_file = work, usage_file
        self._restarts_counted = 0
        probed = max(_PROBE_SECONDS, len(clients) / _PROBES_PER_SECOND)
        self._probe_seconds = min(probed, settings.health_timeout / 4)
        self._timeline = EngineTimeline(_open_timeline(usage_file), len(clients), self._probe_seconds)

    def begin(self, version: int) -> None:
        """Send no requests to an engine until it serves the weights ``version``."""
        self.version = version
        for engine in self.engines:
            engine.serving.clear()

    async def sync(self, manifest: Manifest, version: int, *, resync: bool) -> SyncResult:
        """Load the published weights into the engines, all at the same time.

        resync: ``begin`` was called for this version; only engines that do not serve it yet are synced.
        Waits for the first start of each engine. Engines that are being restarted are left out, and set
        ``restarted`` later. An engine that fails during the sync is reported to the launcher.
        Raises EngineError if an engine does not start.
        """
        set_gpu_owner(self._work, trainers=False)
        if not resync:
            self.begin(version)
        self.restarted.clear()
        self.refresh()
        result = SyncResult()

        async def one(engine: PooledEngine) -> None:
            if engine.restart is not None:
                await asyncio.wait([engine.restart], timeout=_RESTART_WAIT_SECONDS)
            elif engine.watch is None:
                await engine.client.wait_ready(self._settings.start_timeout)
                engine.incarnation = incarnation_of(self._work, engine.index)
                note_answer(self._work, engine.index, engine.incarnation)
            self._start_watch(engine)
            incarnation = engine.incarnation
            if not self.is_current(engine, incarnation):
                return
            try:
                report = await self._sync_one(engine, manifest, version)
            except CheckFailed as e:
                result.refused.append(f"engine {engine.index}: {e}")
            except SyncError as e:
                self.mark_failed(engine, incarnation, f"engine {engine.index}: {e}")
            else:
                # If it was restarted meanwhile, the new process has no weights.
                if self.is_current(engine, incarnation):
                    result.reports.append(report)
                    engine.version = version
                    self.on_synced(engine, version)
                    self._set_serving(engine)

        await run_all([one(engine) for engine in self.engines if not engine.serving.is_set()])
        return result

    async def _sync_one(self, engine: PooledEngine, manifest: Manifest, version: int) -> SyncReport:
        engine.link_timeout = float(manifest.place.get("timeout", 0.0))
        logger.info("engine %d: sync of version %d begins", engine.index, version)
        try:
            return await sync_engine(
                engine.client.post,
                manifest,
                version=version,
                engine_tensor=self._settings.tensor,
                timeout=self._settings.request_timeout,
                asleep=self._settings.colocated,
                interrupt=self._interrupt,
            )
        finally:
            engine.link_timeout = 0.0

    async def sleep(self, level: int) -> None:
        """Put all engines to sleep, which frees their GPU memory.

        Level 1 keeps the weights in host memory; level 2 discards them, and the next sync loads new ones.
        Call it while no request is running. Waits for engines that are starting. An engine that does not go
        to sleep is reported to the launcher.
        """
        if level == 2:
            for engine in self.engines:
                engine.version = None
        # The launcher restarts no engine from here on; wait for those that it has just restarted.
        set_gpu_owner(self._work, trainers=True)
        self.refresh()
        starting = [
            r.restart
            for r in self.engines
            if r.restart and incarnation_of(self._work, r.index) != r.incarnation
        ]
        if starting:
            await asyncio.wait(starting)
        await self._post_all(f"/sleep?level={level}&mode=abort")

    async def wake(self) -> None:
        """Wake all engines from level 1; they serve the same weights as before."""
        set_gpu_owner(self._work, trainers=False)
        await self._post_all("/wake_up")

    async def _post_all(self, path: str) -> None:
        async def one(engine: PooledEngine) -> None:
            incarnation = engine.incarnation
            if not self.is_current(engine, incarnation):
                return  # restarting, or just restarted and awake: the next call puts it to sleep
            try:
                status, text = await engine.client.post(path)
            except EngineError as e:
                self.mark_failed(engine, incarnation, str(e))
                return
            if status != 200:
                self.mark_failed(
                    engine,
                    incarnation,
                    f"engine {engine.index} answered {path} with {status}: {text[:300]}",
                )

        self.refresh()
        await run_all([one(engine) for engine in self.engines])

    def is_serving(self) -> bool:
        """Whether any engine gets requests."""
        return any(engine.serving.is_set() for engine in self.engines)

    def require_version(self, version: int | None) -> None:
        """Check that ``version`` was synced last; call it before sending requests.

        None accepts any version. Engines that were never synced serve the weights that they started with.
        Raises EngineError for another version.
        """
        if self.version is None:
            for engine in self.engines:
                if not engine.is_restarting:
                    self._set_serving(engine)
                    self._start_watch(engine)
        elif version is not None and version != self.version:
            raise EngineError(f"weights {version} requested, but version {self.version} was synced last")
        self.refresh()

    def is_current(self, engine: PooledEngine, incarnation: int) -> bool:
        """Whether the engine runs and still has that incarnation; if not, it is marked as restarting."""
        if engine.incarnation == incarnation and incarnation_of(self._work, engine.index) != incarnation:
            self._mark_restarting(engine)
        return engine.incarnation == incarnation and not engine.is_restarting

    def refresh(self) -> None:
        """Detect engines that the launcher restarted on its own."""
        for engine in self.engines:
            self.is_current(engine, engine.incarnation)

    def pop_counts(self) -> dict[str, float]:
        """Metrics ``engine/*`` since the last call."""
        restarts = sum(incarnation_of(self._work, engine.index) for engine in self.engines)
        counts = {
            "engine/restarts": float(restarts - self._restarts_counted),
            "engine/requests_resent": float(self.resent),
        }
        self._restarts_counted, self.resent = restarts, 0
        rows = [row for engine in self.engines if (row := engine.usage.pop(engine.index))]
        if rows and self._usage_file:
            try:
                append_rows(self._usage_file, self.version, rows)
            except OSError as e:  # training does not depend on it
                logger.warning("%s: %s; a step is missing from this file", self._usage_file, e)
        return counts | (summarise(rows) if rows else {})

    def mark_failed(self, engine: PooledEngine, incarnation: int, reason: str) -> None:
        """Request a restart of the engine, once per incarnation.

        Raises EngineError with the reason if ``engine.restarts`` is 0.
        """
        if not self.is_current(engine, incarnation):
            return
        if not self._settings.restarts:
            raise EngineError(reason)
        self._ask_restart(engine, incarnation, reason)

    def _set_serving(self, engine: PooledEngine) -> None:
        engine.serving.set()
        self.dispatch_needed.set()

    def _ask_restart(self, engine: PooledEngine, incarnation: int, reason: str) -> None:
        logger.warning("%s; requesting a restart", reason)
        ask_restart(self._work, engine.index, incarnation, reason)
        self._mark_restarting(engine)

    def _mark_restarting(self, engine: PooledEngine) -> None:
        engine.serving.clear()
        engine.version = None
        if not engine.is_restarting:
            engine.restart = asyncio.create_task(self._wait_restarted(engine))

    async def _wait_restarted(self, engine: PooledEngine) -> None:
        """Wait until a new incarnation answers. The launcher limits start time and number of restarts."""
        while (
            incarnation_of(self._work, engine.index) == engine.incarnation or not await engine.client.health()
        ):
            await asyncio.sleep(_POLL_SECONDS)
        engine.incarnation = incarnation_of(self._work, engine.index)
        note_answer(self._work, engine.index, engine.incarnation)
        logger.info("engine %d has restarted", engine.index)
        if self.version is None:  # never synced: it serves the weights that it starts with
            self._set_serving(engine)
        self.restarted.set()

    def _start_watch(self, engine: PooledEngine) -> None:
        if engine.watch is None:
            engine.watch = asyncio.create_task(self._watch(engine))

    async def _watch(self, engine: PooledEngine) -> None:
        """Detect an engine that hangs; the launcher detects one that exits.

        If restarts are not allowed, the launcher ends the run instead of restarting the engine.
        """
        await engine.client.wait_ready(self._settings.start_timeout)
        engine.usage = EngineLoad()
        allowed = self._settings.health_timeout
        interval = self._probe_seconds
        since: float | None = None  # time of the first probe without an answer
        while True:
            await asyncio.sleep(interval)
            incarnation, sent = engine.incarnation, time.monotonic()
            since = since or sent
            timeout = max(since + allowed - interval - sent, _MIN_PROBE_SECONDS)
            healthy = engine.is_restarting or await engine.client.is_progressing(timeout)
            now = time.monotonic()
            if healthy and not engine.is_restarting:
                with suppress(EngineError, ValueError):  # skip this sample
                    values = await engine.client.metrics(_PROBE_SECONDS)
                    engine.usage.add(values, time.monotonic())
                    self._timeline.add(engine.index, values, time.monotonic())
            # During a sync, a worker may wait for a trainer's message up to the transport's timeout.
            limit = max(allowed, engine.link_timeout)
            if healthy or incarnation != engine.incarnation or now > sent + timeout + _LATE_SECONDS:
                since = None
            elif now >= since + limit - interval and self.is_current(engine, incarnation):
                key = "engine.health_timeout" if limit == allowed else "during a weight sync"
                reason = f"engine {engine.index} hangs: its core did not answer for {limit:.0f} s ({key})"
                self._ask_restart(engine, incarnation, reason)


def _open_timeline(usage_file: Path | None) -> Timeline:
    def warn(error: OSError) -> None:  # training does not depend on it
        logger.warning("%s; engine samples are missing from the timeline", error)

    return Timeline(usage_file.with_name(TIMELINE) if usage_file else None, warn, rotates=True)

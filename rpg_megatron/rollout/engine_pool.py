"""The engines as the sampler sees them: which of them serves which weights, and who is away.

An engine that is lost (dead, hung, or left with a mixture of weights) is reported to the launcher, which
restarts it. It comes back with random weights, so it gets no request before it was synced again; for that the
trainers must publish once more, and rank 0 is told so (see ``channel.ResyncRequired``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.bridge.controller import CheckFailed, SyncError, SyncReport, sync_engine
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config.rollout import EngineSettings
from rpg_megatron.engine.client import EngineClient, EngineError
from rpg_megatron.engine.restarts import ask_restart, incarnation_of, note_answer, set_gpu_owner
from rpg_megatron.rollout.sampler_client import SyncResult

logger = logging.getLogger("rpg_megatron.sampler")

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 2.0
_RETURN_SECONDS = 0.3
"""How long a sync waits for an engine that may have come back already."""


class Replica:
    """One engine, through all its lives."""

    def __init__(self, client: EngineClient):
        self.client = client
        self.incarnation = 0
        """The life that everything below is about."""
        self.version: int | None = None
        """Version of the weights that it serves; None: unknown, or random ones."""
        self.serving = asyncio.Event()
        """Set while it serves the weights of the step."""
        self.away: asyncio.Task[None] | None = None
        """Ends when a lost engine answers again; it has no weights then. None if it was never lost."""
        self.watch: asyncio.Task[None] | None = None

    @property
    def index(self) -> int:
        """Its number."""
        return self.client.index

    @property
    def is_away(self) -> bool:
        """Lost, and not back yet."""
        return self.away is not None and not self.away.done()

    @property
    def needs_weights(self) -> bool:
        """Back, and not synced yet."""
        return self.away is not None and self.away.done() and not self.serving.is_set()


class EnginePool:
    """All engines of a run. Its methods belong to one event loop."""

    def __init__(self, settings: EngineSettings, clients: Sequence[EngineClient], work: Path):
        """work: the folder that is shared with the launcher."""
        self.replicas = [Replica(client) for client in clients]
        self.version: int | None = None
        """Version that the engines are to serve; None before the first sync."""
        self.returned = asyncio.Event()
        """Set when an engine came back and waits for weights."""
        self.resent = 0
        """How many requests had to be sent again."""
        self._settings = settings
        self._work = work
        self._counted = 0

    async def sync(self, manifest: Manifest, version: int, *, again: bool) -> SyncResult:
        """Bring the published weights into the engines, all at the same time.

        again: the version is still the same, and only those engines are synced that do not serve it.
        Engines that start with the run are waited for; those that are being restarted are left out, and make
        themselves heard later. One that is lost on the way is reported to the launcher.
        Raises EngineError if an engine does not come up.
        """
        set_gpu_owner(self._work, trainers=False)
        if not again:
            self.version = version
            for replica in self.replicas:
                replica.serving.clear()
        self.returned.clear()
        self.refresh()
        result = SyncResult()

        async def one(replica: Replica) -> None:
            if replica.away is not None:
                await asyncio.wait([replica.away], timeout=_RETURN_SECONDS)
            elif replica.watch is None:
                await replica.client.wait_ready(self._settings.start_timeout)
                replica.incarnation = incarnation_of(self._work, replica.index)
                note_answer(self._work, replica.index, replica.incarnation)
            if replica.watch is None:
                replica.watch = asyncio.create_task(self._watch(replica))
            incarnation = replica.incarnation
            if not self.check(replica, incarnation):
                return
            try:
                report = await self._sync_one(replica, manifest, version)
            except CheckFailed as e:
                result.refused.append(f"engine {replica.index}: {e}")
            except SyncError as e:
                self.mark_failed(replica, incarnation, f"engine {replica.index}: {e}")
            else:
                # If it died right after, what has come back knows nothing.
                if self.check(replica, incarnation):
                    result.reports.append(report)
                    replica.version = version
                    replica.serving.set()

        await run_all([one(replica) for replica in self.replicas if not replica.serving.is_set()])
        return result

    async def _sync_one(self, replica: Replica, manifest: Manifest, version: int) -> SyncReport:
        return await sync_engine(
            replica.client.post,
            manifest,
            version=version,
            engine_tensor=self._settings.tensor,
            timeout=self._settings.request_timeout,
            asleep=self._settings.colocated,
        )

    async def sleep(self, level: int) -> None:
        """Have all engines leave their GPUs. Level 1: their weights wait in host memory. 2: they are gone,
        and the next sync brings others.

        To be called while nothing is asked of them. One that is starting is waited for, one that does not go
        to sleep is reported to the launcher.
        """
        if level == 2:
            for replica in self.replicas:
                replica.version = None
        # From here on none is restarted; those that just were come first.
        set_gpu_owner(self._work, trainers=True)
        self.refresh()
        starting = [
            r.away for r in self.replicas if r.away and incarnation_of(self._work, r.index) != r.incarnation
        ]
        if starting:
            await asyncio.wait(starting)
        await self._tell_all(f"/sleep?level={level}&mode=abort")

    async def wake(self) -> None:
        """After level 1: let all engines serve again what they served."""
        set_gpu_owner(self._work, trainers=False)
        await self._tell_all("/wake_up")

    async def _tell_all(self, path: str) -> None:
        async def one(replica: Replica) -> None:
            incarnation = replica.incarnation
            if not self.check(replica, incarnation):
                return  # away, or new and awake: it is put to sleep with the others the next time
            try:
                status, text = await replica.client.post(path)
            except EngineError as e:
                self.mark_failed(replica, incarnation, str(e))
                return
            if status != 200:
                self.mark_failed(
                    replica,
                    incarnation,
                    f"engine {replica.index} answered {path} with {status}: {text[:300]}",
                )

        self.refresh()
        await run_all([one(replica) for replica in self.replicas])

    def expect(self, version: int | None) -> None:
        """Before requests are sent: the engines that take part are those that serve ``version``.

        None: whatever they serve. Engines that nobody ever synced serve what they were started with.
        """
        if self.version is None:
            for replica in self.replicas:
                if not replica.is_away:
                    replica.serving.set()
        elif version is not None and version != self.version:
            raise EngineError(f"asked for weights {version}, but those of {self.version} were synced last")
        self.refresh()

    def check(self, replica: Replica, incarnation: int) -> bool:
        """Whether the engine still is in that life; it counts as away from now on if it is not."""
        if replica.incarnation == incarnation and incarnation_of(self._work, replica.index) != incarnation:
            self._leave(replica)
        return replica.incarnation == incarnation and not replica.is_away

    def refresh(self) -> None:
        """Notice engines that the launcher has restarted of its own accord."""
        for replica in self.replicas:
            self.check(replica, replica.incarnation)

    def pop_counts(self) -> dict[str, float]:
        """The counts, as metrics of a step, since they were taken last."""
        lives = sum(incarnation_of(self._work, replica.index) for replica in self.replicas)
        counts = {
            "engine/restarts": float(lives - self._counted),
            "engine/requests_resent": float(self.resent),
        }
        self._counted, self.resent = lives, 0
        return counts

    def mark_failed(self, replica: Replica, incarnation: int, reason: str) -> None:
        """Something of that life failed: have the engine restarted, once for each life.

        Raises EngineError with the reason if engines are not to be restarted.
        """
        if not self.check(replica, incarnation):
            return
        if not self._settings.restarts:
            raise EngineError(reason)
        logger.warning("%s; asking for a restart", reason)
        ask_restart(self._work, replica.index, incarnation, reason)
        self._leave(replica)

    def _leave(self, replica: Replica) -> None:
        replica.serving.clear()
        replica.version = None
        if not replica.is_away:
            replica.away = asyncio.create_task(self._return(replica))

    async def _return(self, replica: Replica) -> None:
        """Until a new life answers. How long that may take, and how often, is the launcher's to say."""
        while (
            incarnation_of(self._work, replica.index) == replica.incarnation
            or not await replica.client.health()
        ):
            await asyncio.sleep(_POLL_SECONDS)
        replica.incarnation = incarnation_of(self._work, replica.index)
        note_answer(self._work, replica.index, replica.incarnation)
        logger.info("engine %d is back", replica.index)
        if self.version is None:  # with the weights that it had before
            replica.serving.set()
        self.returned.set()

    async def _watch(self, replica: Replica) -> None:
        """Notice an engine that falls silent; one that is gone the launcher sees by itself."""
        limit = self._settings.health_timeout
        heard = time.monotonic()
        while True:
            await asyncio.sleep(min(_PROBE_SECONDS, limit))
            incarnation = replica.incarnation
            if (
                replica.is_away
                or await replica.client.health(timeout=limit)
                or incarnation != replica.incarnation
            ):
                heard = time.monotonic()
            elif time.monotonic() - heard > limit and self._settings.restarts:
                reason = f"engine {replica.index} did not answer for {limit:.0f} s (engine.health_timeout)"
                self.mark_failed(replica, incarnation, reason)


async def run_all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except BaseExceptionGroup as e:
        raise first_error(e) from None
    return [task.result() for task in tasks]


def first_error(error: BaseException) -> BaseException:
    """What lies in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

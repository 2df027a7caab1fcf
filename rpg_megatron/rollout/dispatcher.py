"""Dispatches groups to engines in the order of their tickets; failures neither lose nor repeat a response.

A group goes to the serving engine with the least load, and to the worker that its prompt determines.
Responses that a failed engine did not finish go to another engine, or wait for the restart. Groups of a dead
worker are generated again, with the same seeds. Groups that the run kept when it was stopped are not.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.config.files import remove, rename
from rpg_megatron.rollout.engine_pool import EnginePool, PooledEngine
from rpg_megatron.rollout.groups import GroupAnswers, GroupScores, GroupTask
from rpg_megatron.rollout.kept_groups import KeptGroup, group_file, part_of, publish_kept
from rpg_megatron.rollout.remote_worker import WorkerDied
from rpg_megatron.rollout.worker import Worker

logger = logging.getLogger("rpg_megatron.sampler")

OVERSUBSCRIPTION = 1.25
"""Responses requested from an engine, relative to those that it decodes at once, so that it is never idle."""
OVERSUBSCRIPTION_AHEAD = 2.0
"""The same with ``rollout.ahead``, where there is always a next group. A group counts until its longest
response has ended, so a larger value is needed."""
_WRITES = 8
"""Groups that are written at the same time when a run is stopped."""


class _GroupState:
    """A group from its submission until it is forgotten."""

    def __init__(self, task: GroupTask, worker: int, on_generated: Callable[[], None]):
        self.task, self.worker, self.on_generated = task, worker, on_generated
        self.graded: asyncio.Future[GroupScores] = asyncio.get_running_loop().create_future()
        self.busy = True
        """Whether it is queued or running."""
        self.file: Path | None = None
        """File of its trajectories, if they are also on disk."""
        self.kept: KeptGroup | None = None
        """While it is loaded: what an earlier stop has kept."""


class Dispatcher:
    """Queued, running and finished groups; workers keep the trajectories. For one event loop."""

    def __init__(
        self,
        pool: EnginePool,
        workers: Sequence[Worker],
        max_sequences: int,
        backup_dir: Path | None = None,
        oversubscription: float = OVERSUBSCRIPTION,
        *,
        backup_all: bool = True,
    ):
        """max_sequences: responses that an engine decodes at once. oversubscription: responses requested from
        it, relative to that. backup_dir: folder for copies of graded groups, in case their worker dies; None:
        they are generated again, which gives the same responses only with the same weights. backup_all: False
        to copy only groups whose rewards may differ the next time.
        """
        self._pool, self._workers, self._max_sequences = pool, workers, max_sequences
        self._backup_dir = backup_dir
        self._backup_all = backup_all
        self._max_in_flight = int(oversubscription * max_sequences)
        self._groups: dict[int, _GroupState] = {}
        self._queue: list[tuple[int, int, _GroupState]] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._assign_task: asyncio.Task[None] | None = None
        self._kept: dict[int, KeptGroup] = {}
        self._kept_folder = Path()
        self.on_lost: Callable[[Exception], None] = lambda error: None
        """Called if a graded group of a dead worker cannot be recovered."""

    def worker_of(self, prompt_id: int) -> int:
        """Number of the worker that a prompt belongs to."""
        return prompt_id % len(self._workers)

    def submit(
        self, task: GroupTask, on_generated: Callable[[], None] = lambda: None
    ) -> asyncio.Future[GroupScores]:
        """Queue a group; the future gets its scores when it is graded.

        on_generated: called when its responses are complete. The future raises errors of engines and workers
        that a retry does not fix.
        """
        state = self._groups[task.ticket] = _GroupState(task, self.worker_of(task.prompt_id), on_generated)
        kept = self._kept.pop(task.ticket, None)
        if kept is not None and kept.is_for(task, older=self._backup_all):
            state.kept = kept
            self._spawn(self._reuse(state, kept))
        else:
            self._enqueue(state)
        return state.graded

    async def generate_on(self, engine: PooledEngine, task: GroupTask) -> GroupScores | None:
        """Generate a group on one engine, bypassing the queue; None if the engine fails.

        A complete group is not generated again, because the engine may then have other weights.
        """
        incarnation, version = engine.incarnation, engine.version
        state = self._groups[task.ticket] = _GroupState(task, self.worker_of(task.prompt_id), lambda: None)
        while self._pool.is_current(engine, incarnation) and engine.version == version:
            try:
                done = await self._worker(state).generate(task, engine.index, incarnation)
                if done.failure:
                    self._pool.mark_failed(engine, incarnation, done.failure)
                if not done.complete:
                    break
                scores = await self._worker(state).score(task.ticket)
                await self._back_up(state, scores)
            except WorkerDied:
                continue
            state.busy = False
            return scores
        return None

    async def answers(self, task: GroupTask) -> GroupAnswers:
        """Texts and verdicts of a graded group."""
        while True:
            try:
                return await self._worker(self._groups[task.ticket]).answers(task.ticket)
            except WorkerDied:  # its successor generates the group again
                await asyncio.sleep(0.1)

    async def forget(self, tickets: Sequence[int]) -> None:
        """Drop groups, finished or not."""
        states = [self._groups.pop(ticket) for ticket in tickets if ticket in self._groups]
        for state in states:
            if state.file is not None:
                remove(state.file)
        for number, worker in enumerate(self._workers):
            own_tickets = [state.task.ticket for state in states if state.worker == number]
            if own_tickets:
                try:
                    await worker.drop(own_tickets)
                except WorkerDied:  # its groups are gone too
                    continue

    async def counts(self) -> dict[str, float]:
        """Metrics ``reward/*`` since the last call, summed over all workers: failures, and counts of reward
        functions. A worker reports only the counts that its own functions returned.
        """
        total: dict[str, float] = {}
        for worker in self._workers:
            try:
                counts = await worker.counts()
            except WorkerDied:
                continue
            total |= {key: total.get(key, 0.0) + value for key, value in counts.items()}
        return total

    def restore_worker(self, number: int) -> None:
        """Give a restarted worker its groups back. number: the worker's."""
        on_disk: dict[Path, list[_GroupState]] = {}
        for state in self._groups.values():
            if state.worker == number and not state.busy:
                state.busy = True
                if state.file is None:
                    self._enqueue(state)
                else:
                    on_disk.setdefault(state.file, []).append(state)
        for file, states in on_disk.items():
            self._spawn(self._reload(states, file))

    async def keep(self, groups: Sequence[KeptGroup], folder: Path) -> None:
        """Write graded groups into ``folder``, in place of what is there. Raises OSError, UserError."""
        part = part_of(folder)
        remove(part)
        part.mkdir()
        # What an earlier stop kept and is not used yet stays.
        unused = [*self._kept.values(), *(s.kept for s in self._groups.values() if s.kept is not None)]
        writing = asyncio.Semaphore(_WRITES)

        async def write(ticket: int) -> None:
            async with writing:
                await self._worker(self._groups[ticket]).save([ticket], group_file(part, ticket))

        try:
            await asyncio.gather(*(write(group.task.ticket) for group in groups if not group.rejected))
            for ticket in [group.task.ticket for group in unused if not group.rejected]:
                rename(group_file(folder, ticket), group_file(part, ticket))
            publish_kept(part, folder, [*groups, *unused])
        except BaseException:
            remove(part, ignore_errors=True)
            raise

    def reuse(self, groups: Sequence[KeptGroup], folder: Path) -> None:
        """Use the groups that ``keep`` wrote into ``folder``, when they are submitted."""
        self._kept, self._kept_folder = {group.task.ticket: group for group in groups}, folder

    def drop_newer(self, version: int) -> None:
        """Use none of these groups if one is newer than the weights that the run has: these were lost, and
        their successors have the same numbers.
        """
        if any(group.task.version > version for group in self._kept.values()):
            self._kept.clear()

    @property
    def reuses(self) -> bool:
        """Whether files of ``reuse`` are still needed."""
        files = (state.file for state in self._groups.values())
        return bool(self._kept) or any(file and file.parent == self._kept_folder for file in files)

    def close(self) -> None:
        """Cancel all tasks."""
        for task in (self._assign_task, *self._tasks):
            if task is not None:
                task.cancel()

    # -- life cycle of a group -------------------------------------------------------------------------------

    def _worker(self, state: _GroupState) -> Worker:
        return self._workers[state.worker]

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enqueue(self, state: _GroupState) -> None:
        heapq.heappush(self._queue, (state.task.ticket, next(self._numbers), state))
        self._pool.dispatch_needed.set()
        if self._assign_task is None:
            self._assign_task = asyncio.create_task(self._assign())

    async def _assign(self) -> None:
        """Give queued groups to engines whenever one is free."""
        while True:
            await self._pool.dispatch_needed.wait()
            self._pool.dispatch_needed.clear()
            while self._queue:
                ticket, _, state = self._queue[0]
                if self._groups.get(ticket) is not state:  # forgotten
                    heapq.heappop(self._queue)
                    continue
                engine = self._free_engine(state.task.samples)
                if engine is None:
                    break
                heapq.heappop(self._queue)
                engine.load += state.task.samples
                self._spawn(self._generate(state, engine))

    def _free_engine(self, samples: int) -> PooledEngine | None:
        """The serving engine with the least load, if it has room for a group of ``samples`` responses."""
        serving = [engine for engine in self._pool.engines if engine.serving.is_set()]
        if not serving:
            return None
        least = min(serving, key=lambda engine: engine.load)
        at_once = min(samples, self._max_sequences)
        groups = max(1, -(-self._max_in_flight // at_once))
        return least if least.load < groups * samples else None

    async def _generate(self, state: _GroupState, engine: PooledEngine) -> None:
        incarnation = engine.incarnation
        try:
            done = await self._worker(state).generate(state.task, engine.index, incarnation)
            self._pool.resent += done.resent
            if done.failure:
                self._pool.mark_failed(engine, incarnation, done.failure)
            elif done.resent:
                self._pool.is_current(engine, incarnation)
        except WorkerDied:
            self._enqueue(state)
        except Exception as e:
            self._fail(state, e)
        else:
            if done.complete:
                state.on_generated()
                self._spawn(self._finish(state))
            else:
                self._enqueue(state)
        finally:
            engine.load -= state.task.samples
            self._pool.dispatch_needed.set()

    async def _reuse(self, state: _GroupState, kept: KeptGroup) -> None:
        ticket = state.task.ticket
        if not kept.rejected:
            file = group_file(self._kept_folder, ticket)
            try:
                await self._worker(state).load([ticket], file)
            except Exception as e:  # whatever it is, the group can be sampled
                logger.warning("group %d is sampled again: %s", ticket, e)
                state.kept = None
                self._enqueue(state)
                return
            state.file = file
        state.busy, state.kept = False, None
        state.on_generated()
        if not state.graded.done():
            state.graded.set_result(kept.scores)

    def _fail(self, state: _GroupState, error: Exception) -> None:
        state.busy = False
        if not state.graded.done():
            state.graded.set_exception(error)
        elif self._groups.get(state.task.ticket) is state:  # a leader may be waiting for it
            self.on_lost(error)

    async def _finish(self, state: _GroupState) -> None:
        try:
            scores = await self._worker(state).score(state.task.ticket)
            await self._back_up(state, scores)
        except WorkerDied:
            self._enqueue(state)
        except Exception as e:
            self._fail(state, e)
        else:
            state.busy = False
            if not state.graded.done():
                state.graded.set_result(scores)

    async def _back_up(self, state: _GroupState, scores: GroupScores) -> None:
        ticket = state.task.ticket
        if scores.repeatable and not self._backup_all:
            return
        current = self._groups.get(ticket) is state
        if self._backup_dir is not None and state.file is None and current:
            file = group_file(self._backup_dir, ticket)
            await self._worker(state).save([ticket], file)
            state.file = file

    async def _reload(self, states: Sequence[_GroupState], file: Path) -> None:
        try:
            await self._worker(states[0]).load([state.task.ticket for state in states], file)
        except WorkerDied:  # its restart calls ``restore_worker`` again
            pass
        except Exception as e:
            self._fail(states[0], e)
        for state in states:
            state.busy = False

"""Gives groups to the engines in the order of their tickets; failures neither lose nor repeat a response.

A group goes to the engine that serves and has least to do, and to the worker that its prompt determines.
What a failed engine leaves unfinished goes to another engine, or waits for the restart; what a dead worker
held is generated again, with the same seeds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.rollout.engine_pool import EnginePool, Replica
from rpg_megatron.rollout.groups import GroupAnswers, GroupScores, GroupTask, GroupWorker
from rpg_megatron.rollout.remote_worker import WorkerGone

OVERSUBSCRIPTION = 1.25
"""Responses asked of an engine, relative to those it decodes at once, so that it never waits for a prompt."""
OVERSUBSCRIPTION_AHEAD = 2.0
"""With ``rollout.ahead``: a group counts until its longest response ends, and there is always a next one."""


class _Job:
    """A group from its submission until it is forgotten."""

    def __init__(self, task: GroupTask, number: int, on_generated: Callable[[], None]):
        self.task, self.number, self.on_generated = task, number, on_generated
        self.graded: asyncio.Future[GroupScores] = asyncio.get_running_loop().create_future()
        self.busy = True
        """Queued, or under way."""
        self.file: Path | None = None
        """Where its trajectories are, if they are on disk too."""


class Dispatcher:
    """The groups under way, and those whose trajectories the workers keep. For one event loop."""

    def __init__(
        self,
        pool: EnginePool,
        workers: Sequence[GroupWorker],
        max_sequences: int,
        keep: Path | None = None,
        oversubscription: float = OVERSUBSCRIPTION,
        *,
        keep_all: bool = True,
    ):
        """max_sequences: responses that an engine decodes at once. oversubscription: responses asked of it,
        relative to that. keep: a folder in which graded groups are kept for the case that their worker dies.
        None: they are generated again, which gives the same only with the same weights. keep_all: False for
        those only whose rewards may be others the next time.
        """
        self._pool, self._workers, self._max_sequences, self._keep = pool, workers, max_sequences, keep
        self._keep_all = keep_all
        self._most = int(oversubscription * max_sequences)
        self._jobs: dict[int, _Job] = {}
        self._queue: list[tuple[int, int, _Job]] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._assigning: asyncio.Task[None] | None = None
        self.on_lost: Callable[[Exception], None] = lambda error: None
        """Called if a graded group, which a dead worker held, cannot be had again."""

    def worker_of(self, prompt_id: int) -> int:
        """Number of the worker for a prompt."""
        return prompt_id % len(self._workers)

    def submit(
        self, task: GroupTask, on_generated: Callable[[], None] = lambda: None
    ) -> asyncio.Future[GroupScores]:
        """Queue a group; the future gets its scores when it is graded.

        on_generated: called when its responses are complete. Errors of engines and workers that do not pass
        are raised by the future.
        """
        job = self._jobs[task.ticket] = _Job(task, self.worker_of(task.prompt_id), on_generated)
        self._enqueue(job)
        return job.graded

    async def generate_on(self, replica: Replica, task: GroupTask) -> GroupScores | None:
        """Generate a group on one engine, past the queue; None if the engine fails.

        Once it is complete it is not generated again: the engine may have other weights then.
        """
        incarnation, version = replica.incarnation, replica.version
        job = self._jobs[task.ticket] = _Job(task, self.worker_of(task.prompt_id), lambda: None)
        while self._pool.check(replica, incarnation) and replica.version == version:
            try:
                done = await self._worker(job).generate(task, replica.index, incarnation)
                if done.failure:
                    self._pool.mark_failed(replica, incarnation, done.failure)
                if not done.complete:
                    break
                scores = await self._worker(job).score(task.ticket)
                await self._keep_on_disk(job, scores)
            except WorkerGone:
                continue
            job.busy = False
            return scores
        return None

    async def answers(self, task: GroupTask) -> GroupAnswers:
        """The texts and verdicts of a group that is graded."""
        while True:
            try:
                return await self._worker(self._jobs[task.ticket]).answers(task.ticket)
            except WorkerGone:  # it generates the group again
                await asyncio.sleep(0.1)

    async def forget(self, tickets: Sequence[int]) -> None:
        """Drop groups, finished or not."""
        found = [self._jobs.pop(ticket) for ticket in tickets if ticket in self._jobs]
        for job in found:
            if job.file is not None and job.file.parent == self._keep:
                job.file.unlink(missing_ok=True)
        for number, worker in enumerate(self._workers):
            mine = [job.task.ticket for job in found if job.number == number]
            if mine:
                try:
                    await worker.drop(mine)
                except WorkerGone:  # and its groups with it
                    continue

    async def save(self, tickets: Sequence[int], name: Callable[[int], Path]) -> dict[int, Path]:
        """Write groups to files, each worker its own; returns each group's file. Raises UserError."""
        jobs = [self._jobs[ticket] for ticket in tickets]

        async def one(number: int) -> None:
            mine = [job for job in jobs if job.number == number and job.file is None]
            while mine:
                try:
                    await self._workers[number].save([job.task.ticket for job in mine], name(number))
                    break
                except WorkerGone:
                    await asyncio.sleep(0.1)
            for job in mine:
                job.file = name(number)

        await asyncio.gather(*(one(number) for number in range(len(self._workers))))
        return {job.task.ticket: job.file for job in jobs if job.file is not None}

    async def load(self, tasks: Sequence[GroupTask], file: Path) -> list[GroupScores]:
        """Let the workers read groups that ``save`` wrote. Raises UserError if the file is not as it was."""
        jobs = [_Job(task, self.worker_of(task.prompt_id), lambda: None) for task in tasks]
        for number, worker in enumerate(self._workers):
            mine = [job for job in jobs if job.number == number]
            if not mine:
                continue
            for job, scores in zip(
                mine, await worker.load([job.task.ticket for job in mine], file), strict=True
            ):
                job.busy, job.file = False, file
                job.graded.set_result(scores)
                self._jobs[job.task.ticket] = job
        return [job.graded.result() for job in jobs]

    async def counts(self) -> dict[str, float]:
        """Metrics ``reward/*`` since the last call, summed over all workers: failures, and what reward
        functions counted, of which a worker knows only what its own have.
        """
        total: dict[str, float] = {}
        for worker in self._workers:
            try:
                counts = await worker.counts()
            except WorkerGone:
                continue
            total |= {key: total.get(key, 0.0) + value for key, value in counts.items()}
        return total

    def restore(self, number: int) -> None:
        """Call it when worker ``number`` was started again: it gets the groups that it had."""
        on_disk: dict[Path, list[_Job]] = {}
        for job in self._jobs.values():
            if job.number == number and not job.busy:
                job.busy = True
                if job.file is None:
                    self._enqueue(job)
                else:
                    on_disk.setdefault(job.file, []).append(job)
        for file, jobs in on_disk.items():
            self._spawn(self._reload(jobs, file))

    def close(self) -> None:
        """End what is under way."""
        for task in (self._assigning, *self._tasks):
            if task is not None:
                task.cancel()

    # -- the way of a group ----------------------------------------------------------------------------------

    def _worker(self, job: _Job) -> GroupWorker:
        return self._workers[job.number]

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enqueue(self, job: _Job) -> None:
        heapq.heappush(self._queue, (job.task.ticket, next(self._numbers), job))
        self._pool.serves.set()
        if self._assigning is None:
            self._assigning = asyncio.create_task(self._assign())

    async def _assign(self) -> None:
        """Give queued groups to engines, whenever one has become free."""
        while True:
            await self._pool.serves.wait()
            self._pool.serves.clear()
            while self._queue:
                ticket, _, job = self._queue[0]
                if self._jobs.get(ticket) is not job:  # forgotten
                    heapq.heappop(self._queue)
                    continue
                replica = self._free_replica(job.task.samples)
                if replica is None:
                    break
                heapq.heappop(self._queue)
                replica.load += job.task.samples
                self._spawn(self._generate(job, replica))

    def _free_replica(self, samples: int) -> Replica | None:
        """The serving engine with least to do, if it should get a group of so many responses."""
        serving = [replica for replica in self._pool.replicas if replica.serving.is_set()]
        if not serving:
            return None
        least = min(serving, key=lambda replica: replica.load)
        at_once = min(samples, self._max_sequences)
        groups = max(1, -(-self._most // at_once))
        return least if least.load < groups * samples else None

    async def _generate(self, job: _Job, replica: Replica) -> None:
        incarnation = replica.incarnation
        try:
            done = await self._worker(job).generate(job.task, replica.index, incarnation)
            self._pool.resent += done.resent
            if done.failure:
                self._pool.mark_failed(replica, incarnation, done.failure)
            elif done.resent:
                self._pool.check(replica, incarnation)
        except WorkerGone:
            self._enqueue(job)
        except Exception as e:
            self._fail(job, e)
        else:
            if done.complete:
                job.on_generated()
                self._spawn(self._finish(job))
            else:
                self._enqueue(job)
        finally:
            replica.load -= job.task.samples
            self._pool.serves.set()

    def _fail(self, job: _Job, error: Exception) -> None:
        job.busy = False
        if not job.graded.done():
            job.graded.set_exception(error)
        elif self._jobs.get(job.task.ticket) is job:  # a leader may wait for it
            self.on_lost(error)

    async def _finish(self, job: _Job) -> None:
        try:
            scores = await self._worker(job).score(job.task.ticket)
            await self._keep_on_disk(job, scores)
        except WorkerGone:
            self._enqueue(job)
        except Exception as e:
            self._fail(job, e)
        else:
            job.busy = False
            if not job.graded.done():
                job.graded.set_result(scores)

    async def _keep_on_disk(self, job: _Job, scores: GroupScores) -> None:
        ticket = job.task.ticket
        if scores.repeatable and not self._keep_all:
            return
        if self._keep is not None and job.file is None and ticket in self._jobs:
            file = self._keep / f"group_{ticket}.parquet"
            await self._worker(job).save([ticket], file)
            job.file = file

    async def _reload(self, jobs: Sequence[_Job], file: Path) -> None:
        try:
            await self._worker(jobs[0]).load([job.task.ticket for job in jobs], file)
        except WorkerGone:  # its successor calls ``restore`` again
            pass
        except Exception as e:
            self._fail(jobs[0], e)
        for job in jobs:
            job.busy = False

"""Asynchronous rollouts: groups that the engines sample while the trainer works (``rollout.ahead``).

Groups are admitted in the order of the prompts, as long as ``kept + under way < (version + 1 + ahead) x G``:
all counted over the run, version = updates that the engines serve, G = ``rollout.prompts_per_step``. A group
that dynamic sampling rejects leaves the count. A batch is the next G kept groups in the order of the prompts,
so which prompts it has does not depend on timing, and its tokens are at most ``ahead`` updates old.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rpg_megatron.config import Settings
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.dynamic_sampling import DynamicSampler, Group, keeps
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.task_stream import TaskStream


@dataclass(eq=False)
class _Entry:
    """A group that was admitted and is in no batch yet."""

    task: GroupTask
    position: dict[str, Any]
    """Where the stream is after this group."""
    group: Group | None = None
    """With its scores, once it is graded."""
    kept: bool = False
    forgotten: bool = False


@dataclass(frozen=True)
class NextBatch:
    """The groups of a step."""

    groups: list[Group]
    metrics: dict[str, float]
    """``sampling/*`` and ``async/*``."""
    position: dict[str, Any]
    """Where the stream is after the step's last group."""
    ready: list[int]
    """Tickets of the groups that follow, as far as all are graded."""


class RolloutProducer:
    """Keeps the engines busy, and makes batches in prompt order. For one event loop."""

    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        stream: TaskStream,
    ):
        self._rollout, self._steps = settings.rollout, settings.training.steps
        self._dispatcher, self._stream = dispatcher, stream
        self._front: list[_Entry] = []
        """The next entries in the order of the prompts, as far as all are graded."""
        self._rest: deque[_Entry] = deque()
        """Those that follow."""
        self._kept = self._under_way = 0
        """Numbers of entries."""
        self._version: int | None = None
        self._handed_out = 0
        """Batches handed out over the run."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._held, self._held_since = 0.0, 0.0

    def admit(self, version: int) -> None:
        """The engines get the weights ``version`` next: admit the groups that these allow."""
        if self._version is None:
            self._handed_out = version
        self._version = version
        self._fill()

    async def next_batch(self, step: int, on_progress: Callable[[int, int], None]) -> NextBatch:
        """The groups of the step, when all of them are graded.

        on_progress: called with the number of groups that are ready for it, and their total. Raises UserError
        if dynamic sampling rejects too many, and what failed in engines and workers.
        """
        while (window := self._window(step)) is None:
            on_progress(min(self._kept, self._rollout.prompts_per_step), self._rollout.prompts_per_step)
            await self._wait()
        del self._front[: len(window)]
        groups = [entry.group for entry in window if entry.kept and entry.group]
        self._kept -= len(groups)
        self._handed_out += 1
        if self._held_since:
            self._note_held()
        held, self._held = self._held, 0.0
        sampling = DynamicSampler(self._rollout)
        sampling.add([entry.group for entry in window if entry.group])
        metrics = sampling.metrics() | version_metrics(groups, step - 1)
        metrics |= {
            "async/ready": float(self._kept),
            "async/in_flight": float(self._under_way),
            "async/sampler_held": held,
        }
        ready = [entry.task.ticket for entry in self._front]
        return NextBatch(groups, metrics, window[-1].position, ready)

    async def drained(self, serving: Callable[[], bool]) -> None:
        """Wait until everything that the version allows is graded, or no engine serves it any more.

        serving: whether an engine serves.
        """
        while self._under_way and serving():
            await self._wait()

    def reset(self, position: dict[str, Any], carried: Sequence[Group]) -> list[int]:
        """Begin anew, with groups that a synchronous step carried over; returns all tickets so far."""
        before = [*self._front, *self._rest]
        for entry in before:
            entry.forgotten = True
        self._front = [_Entry(g.task, position, g, True) for g in carried]
        self._rest = deque()
        self._kept, self._under_way, self._version = len(self._front), 0, None
        self._held, self._held_since = 0.0, 0.0
        return [entry.task.ticket for entry in before]

    def close(self) -> None:
        """End what is under way."""
        for task in self._dropping:
            task.cancel()

    def _window(self, step: int) -> list[_Entry] | None:
        """The entries up to the step's last group, if all are graded."""
        while self._rest and self._rest[0].group is not None:
            self._front.append(self._rest.popleft())
        total, kept = self._rollout.prompts_per_step, 0
        if self._kept >= total:
            for number, entry in enumerate(self._front, 1):
                kept += entry.kept
                if kept == total:
                    return self._front[:number]
        dynamic = self._rollout.dynamic
        if dynamic is not None and len(self._front) >= dynamic.rounds * total:
            sampling = DynamicSampler(self._rollout)
            sampling.add([entry.group for entry in self._front if entry.group])
            raise sampling.not_full(step, dynamic.rounds)
        return None

    async def _wait(self) -> None:
        """Until a group is graded, or for a moment. Raises what failed."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 0.5)
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        """Admit groups up to the bound."""
        if self._version is None or self._error is not None:
            return
        batches = min(self._version + 1 + self._rollout.ahead, self._steps) - self._handed_out
        limit = batches * self._rollout.prompts_per_step
        while self._kept + self._under_way < limit:
            task, position = self._stream.take_ahead(self._version)
            entry = _Entry(task, position)
            self._rest.append(entry)
            self._under_way += 1
            future = self._dispatcher.submit(task)
            future.add_done_callback(partial(self._graded, entry))
        if self._under_way and self._held_since:
            self._note_held()
        elif not self._under_way and not self._held_since:
            self._held_since = time.monotonic()

    def _graded(self, entry: _Entry, future: asyncio.Future[Any]) -> None:
        if future.cancelled() or entry.forgotten:
            return
        self._under_way -= 1
        try:
            scores = future.result()
            entry.kept = keeps(self._rollout, scores)
        except Exception as e:  # raised by ``next_batch``; here it would only be logged
            self._error = self._error or e
        else:
            entry.group = Group(entry.task, scores)
            self._kept += entry.kept
            if not entry.kept:
                task = asyncio.create_task(self._dispatcher.forget([entry.task.ticket]))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
            self._fill()
        self._changed.set()

    def _note_held(self) -> None:
        now = time.monotonic()
        self._held += now - self._held_since
        self._held_since = 0.0 if self._under_way else now


def version_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """``async/*`` of a batch that updates the weights ``version``: the age of its tokens in updates."""
    scores = [group.scores for group in groups]
    lags = [(version - v, n) for s in scores for v, n in s.versions.items()]
    tokens = max(sum(n for _, n in lags), 1)
    responses = sum(len(s.lengths) for s in scores)
    return {
        "async/lag_mean": sum(lag * n for lag, n in lags) / tokens,
        "async/lag_max": float(max((lag for lag, _ in lags), default=0)),
        "async/stale_tokens": sum(n for lag, n in lags if lag) / tokens,
        "async/mixed_responses": sum(s.mixed for s in scores) / responses,
        "async/segments": sum(s.segments for s in scores) / responses,
        "async/recomputed_tokens": float(sum(s.recomputed for s in scores)),
    }

"""The producer of rollouts: admits groups to the engines, and makes batches in the order of the prompts.

Groups are admitted in the order of the prompts while ``kept + in flight < (version + 1 + ahead) x G``. Counts
are over the run; version = updates that the engines serve, G = ``rollout.prompts_per_step``, ahead =
``rollout.ahead``. Groups that dynamic sampling rejects do not count. A batch is the next G kept groups in the
order of the prompts. So its prompts do not depend on timing, and its tokens are at most ``ahead`` updates
old.

With ``ahead: 0`` a step's groups are admitted when the trainer asks for them. ``rollout.dynamic.oversample``
then raises G in the limit; groups beyond the batch are discarded, and their prompts come again in the next
step. With more, groups are sampled while the trainer works, and admitted as late as ``admission.py`` allows.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.rollout.admission import Admission
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.dynamic_sampling import (
    Group,
    failures_of,
    passes_filter,
    rounds_exhausted,
    sampling_metrics,
)
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.kept_groups import KeptGroup
from rpg_megatron.rollout.task_stream import TaskStream


@dataclass(eq=False)
class _AdmittedGroup:
    """A group that was admitted and is not in a batch yet. Times are those of the event loop."""

    task: GroupTask
    position: dict[str, Any]
    """Position of the stream after this group."""
    admitted: float
    generated: float = 0.0
    """When its last response ended."""
    graded: float = 0.0
    group: Group | None = None
    """The graded group; None until then."""
    kept: bool = False
    """Whether dynamic sampling keeps it."""
    forgotten: bool = False
    """Whether ``reset`` has dropped it."""

    def note_generated(self) -> None:
        """Its last response has ended."""
        self.generated = _now()


@dataclass(frozen=True)
class NextBatch:
    """The groups of a step."""

    groups: list[Group]
    metrics: dict[str, float]
    """``sampling/*`` and ``async/*``."""
    position: dict[str, Any]
    """Position of the stream after the step's last group."""
    generated: float
    """When the last response ended, in the time of the event loop."""
    failures: FailureCount
    """Failures of the reward in these groups, and in those rejected between them."""


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
        self._graded_entries: list[_AdmittedGroup] = []
        """The next groups in the order of the prompts, up to the first that is not graded."""
        self._pending_entries: deque[_AdmittedGroup] = deque()
        """The groups that follow them."""
        self._kept_count = self._in_flight = 0
        """Number of groups that are kept, and that are not graded yet."""
        self._version: int | None = None
        """Version of the weights that new groups are for; None: none are admitted."""
        self._batches = 0
        """Number of batches returned over the run."""
        # With ``drain``, whether groups start before or after an update must not depend on timing.
        late = self._rollout.ahead > 0 and self._rollout.inflight == "continue"
        self._admission = Admission() if late else None
        self._timer: asyncio.TimerHandle | None = None
        """Admits groups when they are due."""
        self._changed = asyncio.Event()
        self._on_progress: Callable[[int, int], None] = lambda done, total: None
        self._error: BaseException | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._held, self._held_since = 0.0, 0.0
        """Seconds without a group in flight, since the last batch; and the start of the current interval."""

    def admit(self, version: int) -> None:
        """Admit the groups that weights ``version``, which the engines get next, allow."""
        if self._version is None:
            self._batches = version
        self._version = version
        self._admit_groups()

    async def next_batch(
        self, step: int, version: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> NextBatch:
        """The groups of the step, when all of them are graded.

        version: of the weights that the engines serve. on_progress: called with the number of groups that are
        ready, and the number needed. Raises UserError if dynamic sampling rejects too many groups, and the
        errors of engines and workers.
        """
        self._on_progress = on_progress
        self._report_progress()
        if self._admission is not None:
            self._admission.ask(_now())
        self.admit(version)
        while (window := self._next_window(step)) is None:
            await self._wait()
        del self._graded_entries[: len(window)]
        return await self._batch_of(window, step)

    async def _batch_of(self, window: list[_AdmittedGroup], step: int) -> NextBatch:
        entries = [entry for entry in window if entry.kept]
        groups = [entry.group for entry in entries if entry.group]
        everyone = [entry.group for entry in window if entry.group]
        self._kept_count -= len(groups)
        self._batches += 1
        metrics = sampling_metrics(self._rollout, everyone)
        if self._rollout.ahead:
            metrics |= version_metrics(groups, step - 1) | self._async_metrics()
        else:
            self._stream.rewind(window[-1].position)
            discarded = self.reset()
            await self._dispatcher.forget(discarded)
            if self._rollout.dynamic is not None:
                metrics["sampling/discarded"] = float(len(discarded))
        if self._admission is not None:
            first, last = min(e.admitted for e in entries), max(e.graded for e in entries)
            self._admission.hand_over(_now(), first, last)
            self._admit_groups()
        generated = max(entry.generated for entry in entries)
        return NextBatch(groups, metrics, window[-1].position, generated, failures_of(everyone))

    async def drain(self, serving: Callable[[], bool]) -> None:
        """Wait until all admitted groups are graded, or no engine is serving.

        serving: whether any engine is serving.
        """
        while self._in_flight and serving():
            await self._wait()

    def reset(self) -> list[int]:
        """Drop all groups; none are admitted until ``admit``. Returns the tickets to forget."""
        before = [*self._graded_entries, *self._pending_entries]
        for entry in before:
            entry.forgotten = True
        self._graded_entries, self._pending_entries = [], deque()
        self._kept_count, self._in_flight, self._version = 0, 0, None
        self._held, self._held_since = 0.0, 0.0
        self._set_timer(None)
        return [entry.task.ticket for entry in before]

    def graded(self) -> list[KeptGroup]:
        """The graded groups that are not in a batch yet."""
        entries = [*self._graded_entries, *self._pending_entries]
        return [KeptGroup(e.task, e.group.scores, not e.kept) for e in entries if e.group is not None]

    def _next_window(self, step: int) -> list[_AdmittedGroup] | None:
        """The groups up to the step's last one, if all are graded; else None."""
        while self._pending_entries and self._pending_entries[0].group is not None:
            self._graded_entries.append(self._pending_entries.popleft())
        total, kept = self._rollout.prompts_per_step, 0
        if self._kept_count >= total:
            for number, entry in enumerate(self._graded_entries, 1):
                kept += entry.kept
                if kept == total:
                    return self._graded_entries[:number]
        dynamic = self._rollout.dynamic
        if dynamic is not None and len(self._graded_entries) >= (most := dynamic.most_groups(total)):
            graded = [entry.group for entry in self._graded_entries[:most] if entry.group]
            raise rounds_exhausted(self._rollout, graded, step)
        return None

    async def _wait(self) -> None:
        """Wait until a group is graded, for 0.5 s at most. Raises the error of a failed group."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 0.5)
        if self._error is not None:
            raise self._error

    def _admit_groups(self) -> None:
        """Admit groups up to the limit."""
        if self._version is None or self._error is not None:
            return
        while self._kept_count + self._in_flight < self._limit():
            try:
                task, position = self._stream.take(self._version)
            except UserError as e:  # of a source that is asked during the run
                self._error = e
                self._changed.set()
                return
            entry = _AdmittedGroup(task, position, _now())
            self._pending_entries.append(entry)
            self._in_flight += 1
            future = self._dispatcher.submit(task, entry.note_generated)
            future.add_done_callback(partial(self._on_graded, entry))
        if self._admission is not None:
            self._set_timer(self._admission.seconds_to_next(_now()))
        if self._in_flight and self._held_since:
            self._add_held_time()
        elif not self._in_flight and not self._held_since:
            self._held_since = _now()

    def _limit(self) -> int:
        """Number of groups, after those of returned batches, that may be kept or in flight now."""
        assert self._version is not None
        batches = 1
        if ahead := self._rollout.ahead:
            batches = min(self._version + 1 + ahead, self._steps) - self._batches
        if self._admission is not None:
            batches = min(batches, self._admission.due(_now()))
        dynamic = self._rollout.dynamic
        return math.ceil(batches * self._rollout.prompts_per_step * (dynamic.oversample if dynamic else 1))

    def _set_timer(self, seconds: float | None) -> None:
        """Admit groups again in ``seconds``; None: not before the next event."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._admit_groups)

    def _on_graded(self, entry: _AdmittedGroup, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()  # asyncio logs an exception that is never read
        if entry.forgotten:
            return
        self._in_flight -= 1
        try:
            if error is not None:
                raise error
            scores = future.result()
            entry.kept = passes_filter(self._rollout, scores)
        except Exception as e:  # raised by ``next_batch``; here it would only be logged
            self._error = self._error or e
        else:
            entry.group, entry.graded = Group(entry.task, scores), _now()
            self._kept_count += entry.kept
            if entry.kept:
                self._report_progress()
            else:
                task = asyncio.create_task(self._dispatcher.forget([entry.task.ticket]))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
            self._admit_groups()
        self._changed.set()

    def _report_progress(self) -> None:
        total = self._rollout.prompts_per_step
        self._on_progress(min(self._kept_count, total), total)

    def _async_metrics(self) -> dict[str, float]:
        """``async/*`` of the producer's state when a batch is returned."""
        if self._held_since:
            self._add_held_time()
        held, self._held = self._held, 0.0
        return {
            "async/ready": float(self._kept_count),
            "async/in_flight": float(self._in_flight),
            "async/sampler_held": held,
        }

    def _add_held_time(self) -> None:
        now = _now()
        self._held += now - self._held_since
        self._held_since = 0.0 if self._in_flight else now


def _now() -> float:
    return asyncio.get_running_loop().time()


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

"""A simulation of rollouts that run ahead of the trainer, for ``benchmarks.async_rollouts``.

One engine decodes up to ``slots`` responses at once. A step of it takes a + c d + p f seconds, for d
responses that get one more token and f tokens of prompts. Groups are admitted in order, while their number
is below (version + 1 + ahead) x groups a step; at most ``groups`` of them are given to the engine and not yet
complete. The trainer takes the next batch when all of its groups are complete; training and then the weight
sync take the seconds that they are given. At the sync the engine stands still, and afterwards it computes
prompt and tokens of all unfinished responses again (``drain``: all admitted ones are finished first).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds."""

    step: float
    """a: a step of the engine, whatever it computes."""
    token: float
    """c: a token of a response, in addition."""
    prefill: float
    """p: a token of a prompt, in addition."""
    train: float
    """Log-probs and updates, for each token of a batch, prompts included."""
    sync: float
    """A weight sync."""
    rest: float
    """Everything else of a step that neither overlaps with sampling nor depends on the batch."""


@dataclass
class Simulated:
    """What happened, step by step: index i is that of step i + 1."""

    ends: list[float]
    """When each step ended."""
    waited: list[float]
    """How long the trainer had waited for its batch."""
    busy: list[float]
    """Seconds that the engine had computed by the end of the step, since the start."""


@dataclass
class _Response:
    group: int
    left: int
    """Tokens to come."""
    known: int
    """Tokens to compute before the next one comes: the prompt, and after a sync also the response so far."""


class _Engine:
    def __init__(self, costs: Costs, slots: int):
        self.costs, self.slots = costs, slots
        self.waiting: deque[_Response] = deque()
        self.steps = 0
        self.running: list[tuple[int, int, _Response]] = []
        """(step after which it is complete, serial number, response): a heap."""
        self._serial = 0
        self._fresh: list[_Response] = []
        """Running, but their prompts are still to be computed."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> tuple[float, list[_Response]]:
        """Seconds of one step, and the responses that it completed."""
        while self.waiting and len(self.running) < self.slots:
            response = self.waiting.popleft()
            self._serial += 1
            heapq.heappush(self.running, (self.steps + response.left, self._serial, response))
            self._fresh.append(response)
        decoded, prefilled = len(self.running) - len(self._fresh), sum(r.known for r in self._fresh)
        self._fresh = []
        self.steps += 1
        done = []
        while self.running and self.running[0][0] <= self.steps:
            done.append(heapq.heappop(self.running)[2])
        costs = self.costs
        return costs.step + costs.token * decoded + costs.prefill * prefilled, done

    def forget_cache(self) -> None:
        """New weights: what the running responses have so far is computed again."""
        for ends, _, response in self.running:
            if response not in self._fresh:
                left = ends - self.steps
                response.known, response.left = response.known + response.left - left, left
        self._fresh = [response for _, _, response in self.running]


def simulate(
    lengths: Sequence[Sequence[Sequence[int]]],
    prompt: int,
    costs: Costs,
    *,
    slots: int,
    groups: int,
    ahead: int,
    drain: bool = False,
) -> Simulated:
    """A run of ``len(lengths)`` steps. lengths: [step][group][sample] -> tokens. prompt: tokens of one."""
    work = [group for batch in lengths for group in batch]
    each = len(lengths[0])
    left = [len(group) for group in work]
    engine = _Engine(costs, slots)
    now = busy = idle_since = 0.0
    admitted = sent = finished = version = 0
    trained_at: float | None = None
    out = Simulated([], [], [])
    while version < len(lengths):
        admitted = min((version + 1 + ahead) * each, len(work))
        while sent < admitted and sent - finished < groups:
            engine.waiting.extend(_Response(sent, n, prompt) for n in work[sent])
            sent += 1
        batch = slice(version * each, (version + 1) * each)
        if trained_at is None and not any(left[batch]):
            out.waited.append(now - idle_since)
            tokens = sum(n + prompt for group in work[batch] for n in group)
            trained_at = now + costs.rest + costs.train * tokens
        if trained_at is not None and now >= trained_at and not (drain and finished < admitted):
            now += costs.sync
            version, trained_at, idle_since = version + 1, None, now
            engine.forget_cache()
            out.ends.append(now)
            out.busy.append(busy)
        elif engine.has_work:
            seconds, done = engine.step()
            now, busy = now + seconds, busy + seconds
            for response in done:
                left[response.group] -= 1
                finished += not left[response.group]
        else:
            assert trained_at is not None, "neither engine nor trainer has anything to do"
            now = trained_at
    return out

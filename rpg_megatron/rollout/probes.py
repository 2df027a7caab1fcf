"""Probes: a few prompts that every engine answers after each weight update, for the guard on mismatch.

With ``rollout.ahead`` a batch may have no tokens sampled by the current weights, and none from some engines.
With top-p, top-k or min-p, its log-probs are not those of the trained distribution. So the trainer compares
its log-probs with those of these answers, for each engine. All engines get the same prompts and seeds, so
their answers are similar unless one has other weights. One prompt is repeated from the weights before: an
engine that kept its prefix cache over the update would answer it from the old weights.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from rpg_megatron.config import Settings
from rpg_megatron.config.objective import PROBE_PROMPTS, PROBE_TOKENS
from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.data.prompt_stream import Prompts
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.client import EngineError
from rpg_megatron.rollout.batch_metrics import index_of_groups
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.engine_pool import PooledEngine
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import seed_of
from rpg_megatron.system.tasks import run_all

_FIRST_TICKET = -(1 << 61)
"""First ticket of probes. Rollouts have tickets of their own, which must not depend on probes."""


class Probes:
    """The probes of the current weights. For the dispatcher's event loop."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, prompts: Prompts):
        """prompts: of the training data; each weight update takes the next few."""
        self._settings, self._dispatcher, self._prompts = settings, dispatcher, prompts
        self._tickets = itertools.count(_FIRST_TICKET)
        self._version = -1
        self._running: dict[int, asyncio.Task[list[Group]]] = {}
        """Probes of the current version, by engine."""
        self._started = asyncio.Event()
        self._dropping: set[asyncio.Task[None]] = set()

    def begin(self, engine: PooledEngine, version: int) -> None:
        """Probe an engine that has just loaded the weights ``version``."""
        if version != self._version:
            self.drop()  # of an engine that restarted after the batch
            self._version = version
        self._running[engine.index] = asyncio.create_task(self._probe(engine, version))
        self._started.set()

    def drop(self) -> None:
        """Forget the answers that ``collect`` has not returned, when they come."""
        for task in self._running.values():
            self._dropping.add(asyncio.create_task(self._drop(task)))
        self._running = {}

    async def finished(self) -> None:
        """Wait until no probe is running; ``collect`` raises their errors."""
        if self._running:
            await asyncio.wait(self._running.values())

    async def collect(self) -> tuple[list[Group], BatchIndex]:
        """The answers of all engines that have answered, at least one; ``group`` is the engine's index.

        Raises EngineError if an engine failed and ``engine.restarts`` is 0.
        """
        while True:
            self._started.clear()
            running = sorted(self._running.items())
            answers = await asyncio.gather(*(asyncio.shield(task) for _, task in running))
            answered = [
                (engine, group)
                for (engine, _), groups in zip(running, answers, strict=True)
                for group in groups
            ]
            if answered:
                self._running = {}
                groups = [group for _, group in answered]
                index = index_of_groups(
                    groups, self._dispatcher.worker_of, [engine for engine, _ in answered]
                )
                return groups, index
            await self._started.wait()  # all engines have failed; wait for one that is synced again

    async def _drop(self, probe: asyncio.Task[list[Group]]) -> None:
        with suppress(EngineError):
            await self._dispatcher.forget([group.task.ticket for group in await probe])
        self._dropping = {task for task in self._dropping if not task.done()}

    def _choose(self, version: int) -> list[tuple[int, Prompt]]:
        """A version's prompts, with their places in the order of all probes. The last is one of the version
        before: the longest, because an engine caches only full blocks of tokens.
        """
        count = PROBE_PROMPTS
        places = range(max(0, version - 1) * count, (version + 1) * count)
        probes = list(zip(places, self._prompts.fetch([i % len(self._prompts) for i in places]), strict=True))
        before, current = probes[:-count], probes[-count:]
        return [*current, *([max(before, key=lambda pair: len(pair[1].tokens))] if before else [])]

    async def _probe(self, engine: PooledEngine, version: int) -> list[Group]:
        rollout = self._settings.rollout
        tasks = []
        for index, prompt in self._choose(version):
            seed = seed_of(self._settings.seed, "probe", version, index, prompt.id)
            max_tokens = min(PROBE_TOKENS, rollout.max_response_tokens)
            tasks.append(
                GroupTask(
                    next(self._tickets),
                    prompt.id,
                    prompt.tokens,
                    prompt.answer,
                    1,
                    seed,
                    max_tokens,
                    version,
                    rollout.temperature,
                    interruptible=rollout.ahead > 0,
                    graded=False,
                )
            )
        scores = await run_all([self._dispatcher.generate_on(engine, task) for task in tasks])
        failed = [task.ticket for task, score in zip(tasks, scores, strict=True) if score is None]
        await self._dispatcher.forget(failed)
        return [Group(task, score) for task, score in zip(tasks, scores, strict=True) if score is not None]

"""Probes: a few prompts that every engine answers after each weight update, for the guard on mismatch.

With ``rollout.ahead`` a batch may have no token that the present weights sampled, and no engine needs to have
sampled any of it; with top-p, top-k or min-p its log-probs are not those of the trained distribution. So the
trainer compares its log-probs with those of these answers, of each engine. All engines get the same prompts
and seeds: answers and differences are alike unless one has other weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

from rpg_megatron.config import Settings
from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.client import EngineError
from rpg_megatron.rollout.batch_metrics import index_of_groups
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.engine_pool import Replica
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import seed_of
from rpg_megatron.system.tasks import run_all

_FIRST_TICKET = -(1 << 61)
"""The tickets of probes: those of rollouts must not depend on them."""


class Probes:
    """The probes of the present weights. For the dispatcher's event loop."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, prompts: Sequence[Prompt]):
        """prompts: of the training data; each update takes the next few."""
        self._settings, self._dispatcher, self._prompts = settings, dispatcher, prompts
        self._tickets = itertools.count(_FIRST_TICKET)
        self._version = -1
        self._asked: dict[int, asyncio.Task[list[Group]]] = {}
        """Of the present version, by engine."""
        self._begun = asyncio.Event()
        self._dropping: set[asyncio.Task[None]] = set()

    def begin(self, replica: Replica, version: int) -> None:
        """Ask an engine that has just loaded the weights ``version``."""
        if version != self._version:
            for task in self._asked.values():  # of an engine that came back after the batch
                self._dropping.add(asyncio.create_task(self._drop(task)))
            self._version, self._asked = version, {}
        self._asked[replica.index] = asyncio.create_task(self._ask(replica, version))
        self._begun.set()

    async def finished(self) -> None:
        """Wait until no engine is being asked; failures are told by ``collect``."""
        if self._asked:
            await asyncio.wait(self._asked.values())

    async def collect(self) -> tuple[list[Group], BatchIndex]:
        """The answers of all engines that gave them, of at least one; ``group`` is the engine's index.

        Raises what an engine's failure raises if ``engine.restarts`` is 0.
        """
        while True:
            self._begun.clear()
            asked = sorted(self._asked.items())
            answers = await asyncio.gather(*(asyncio.shield(task) for _, task in asked))
            found = [
                (engine, group)
                for (engine, _), groups in zip(asked, answers, strict=True)
                for group in groups
            ]
            if found:
                self._asked = {}
                groups = [group for _, group in found]
                index = index_of_groups(groups, self._dispatcher.worker_of, [engine for engine, _ in found])
                return groups, index
            await self._begun.wait()  # all engines failed since; one gets weights again

    async def _drop(self, asked: asyncio.Task[list[Group]]) -> None:
        with suppress(EngineError):
            await self._dispatcher.forget([group.task.ticket for group in await asked])
        self._dropping = {task for task in self._dropping if not task.done()}

    async def _ask(self, replica: Replica, version: int) -> list[Group]:
        guards, rollout = self._settings.guards, self._settings.rollout
        tasks = []
        for i in range(guards.probe_prompts):
            place = version * guards.probe_prompts + i
            prompt = self._prompts[place % len(self._prompts)]
            seed = seed_of(self._settings.seed, "probe", version, place, prompt.id)
            longest = min(guards.probe_tokens, rollout.max_response_tokens)
            tasks.append(
                GroupTask(
                    next(self._tickets),
                    prompt.id,
                    prompt.tokens,
                    prompt.answer,
                    1,
                    seed,
                    longest,
                    version,
                    rollout.temperature,
                    interruptible=rollout.ahead > 0,
                    graded=False,
                )
            )
        scores = await run_all([self._dispatcher.generate_on(replica, task) for task in tasks])
        lost = [task.ticket for task, found in zip(tasks, scores, strict=True) if found is None]
        await self._dispatcher.forget(lost)
        return [Group(task, found) for task, found in zip(tasks, scores, strict=True) if found is not None]

"""Runs episodes: the default one in this process, the user's in worker processes that can be killed.

Whatever an episode does (raise, wait for ever, block, crash, run out of memory), its response gets a result.
An episode whose process died is run once more from its beginning, in a process of its own: its turns are
sampled with the same seeds. Turns and rewards are asked for from here (``episode_worker``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rpg_megatron.config import Settings
from rpg_megatron.config.rollout import EpisodeSettings
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.episode import (
    EpisodeFunction,
    EpisodeResult,
    EpisodeTask,
    ScoreText,
    TokenLimit,
    result_of,
    single_turn,
)
from rpg_megatron.system.forked_workers import GRACE_SECONDS, ForkServer, Loader, Outcome, WorkerProcess

_MEMORY = 4 * 1024**3
"""Address space of a process that runs episodes beyond what its imports take, in bytes."""
_ALONE = 4
"""Episodes at a time that are run again in a process of their own."""
_SHORTEST = 0.1
"""Seconds until the next look at an episode that has almost reached its deadline and waits for a turn."""
_LOCAL = {"encode", "decode"}
"""Fields of a task that the worker process sets."""


class Attempt(NamedTuple):
    """A response that is to be sampled from its beginning."""

    task: EpisodeTask
    conversation: Conversation
    score: ScoreText


class LocalEpisode:
    """Runs an episode in this process; its errors are raised. For the default one, which has no settings."""

    def __init__(
        self, function: EpisodeFunction = single_turn, settings: EpisodeSettings | None = None
    ) -> None:
        self._function, self.settings, self.name = function, settings, "rollout.episode"

    async def run(self, attempts: Iterator[Attempt]) -> EpisodeResult:
        """Run one response's episode. attempts: the response."""
        task, conversation, score = next(attempts)
        try:
            return result_of(await self._function(task, conversation.generate, score))
        except TokenLimit:
            return EpisodeResult()


class EpisodePool:
    """Runs episodes in worker processes. For one event loop."""

    def __init__(self, settings: Settings, codec: Path):
        """codec: the file of ``load_codec``. Raises UserError if the episode cannot be imported."""
        section = settings.rollout.episode
        assert section is not None
        self.settings, self.name = section, f"rollout.episode {section.type}"
        self._processes: list[WorkerProcess] = []
        self._size = -(-section.workers // settings.rollout.workers)
        self._choosing, self._alone = asyncio.Lock(), asyncio.Semaphore(_ALONE)
        arguments = {
            "path": section.type,
            "settings": section.keywords,
            "deadline": section.deadline,
            "codec": str(codec),
            "model": str(settings.model.path),
        }
        load = "rpg_megatron.rollout.episode_worker:load_server"
        self._server = ForkServer(Loader(load, arguments, f"rollout.episode.type: {section.type}", _MEMORY))

    async def run(self, attempts: Iterator[Attempt]) -> EpisodeResult:
        """Run one response's episode. attempts: the response, and the same again from its beginning."""
        for _ in range(2):
            outcome = await self._try(next(attempts), await self._choose(), alone=False)
            if not outcome.value or not msgspec.convert(outcome.value, EpisodeResult).lost:
                break
        if outcome.failure == "crash":
            async with self._alone:
                process = await WorkerProcess.start(self._server)
                process.is_full = True
                outcome = await self._try(next(attempts), process, alone=True)
        if outcome.failure is not None:
            failure = RewardFailure(self.name, outcome.failure, outcome.detail, outcome.place)
            return EpisodeResult(failure=failure)
        result = msgspec.convert(outcome.value, EpisodeResult)
        return (
            EpisodeResult(failure=RewardFailure(self.name, "crash", result.lost)) if result.lost else result
        )

    def close(self) -> None:
        """Kill the processes."""
        if self._server.kill():
            for process in self._processes:
                process.end()
            self._server.close()

    async def _choose(self) -> WorkerProcess:
        """The process with the fewest episodes."""
        async with self._choosing:
            if sum(not process.is_full for process in self._processes) < self._size:
                self._processes.append(await WorkerProcess.start(self._server))
            self._processes = [process for process in self._processes if not process.is_full]
            return min(self._processes, key=lambda process: process.calls)

    async def _try(self, attempt: Attempt, process: WorkerProcess, *, alone: bool) -> Outcome:
        clock, deadline = asyncio.get_running_loop().time, self.settings.deadline
        conversation, turns = attempt.conversation, _Turns(attempt, process)
        inputs = {key: value for key, value in vars(attempt.task).items() if key not in _LOCAL}
        began = clock()
        turns.number, outcome = process.call({"task": inputs}, turns.on_request)
        turns.outcome = outcome
        try:
            while (left := deadline - (clock() - began - conversation.time_waited)) > 0:
                done, _ = await asyncio.wait([outcome], timeout=max(left, _SHORTEST))
                if done:
                    return outcome.result()
            process.send(turns.number, {"cancel": True})
            await asyncio.wait([outcome], timeout=GRACE_SECONDS)
            if not outcome.done():
                process.end()
            ended = outcome.result()
            if ended.failure == "crash" and not alone:
                return ended  # something blocked the process, maybe another episode
            return Outcome(None, "timeout", f"ended after {deadline:g} s")
        except asyncio.CancelledError:
            process.send(turns.number, {"cancel": True})
            raise
        finally:
            turns.end()


EpisodeRunner = LocalEpisode | EpisodePool


class _Turns:
    """What one episode asks for."""

    number: int
    """Of the call."""
    outcome: asyncio.Future[Outcome]

    def __init__(self, attempt: Attempt, process: WorkerProcess):
        self._attempt, self._process = attempt, process
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turn = -1
        """Request of the last turn."""

    def on_request(self, request: dict[str, Any]) -> None:
        """Begin to answer a request, or give it up."""
        ask = request["ask"]
        if request.get("read"):
            self._attempt.conversation.confirm()
            return
        if request.get("drop"):
            if task := self._tasks.get(ask):
                task.cancel()
            elif ask == self._turn:  # its answer is under way, and nobody waits for it any more
                self._attempt.conversation.discard()
            return
        task = self._tasks[ask] = asyncio.create_task(
            self._answer(ask, request["method"], request["arguments"])
        )
        task.add_done_callback(lambda task: self._on_answer(ask, task))

    def end(self) -> None:
        """Give up what is not answered."""
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, ask: int, method: str, arguments: Any) -> None:
        answer: dict[str, Any] = {"reply": ask}
        try:
            if method == "generate":
                tokens, most, branch = arguments
                turn = await self._attempt.conversation.sample(tokens, most, branch=branch)
                self._turn = ask
                answer["turn"] = turn.sampled.tolist(), turn.finish, turn.logprobs.tolist()
            else:
                answer["score"] = await self._attempt.score(*arguments)
        except TokenLimit as e:
            answer["limit"] = str(e)
        except ValueError as e:
            answer["error"] = str(e)
        self._process.send(self.number, answer)

    def _on_answer(self, ask: int, task: asyncio.Task[None]) -> None:
        del self._tasks[ask]
        if not task.cancelled() and (error := task.exception()) and not self.outcome.done():
            self.outcome.set_exception(error)  # such as of the run's reward: not of the episode

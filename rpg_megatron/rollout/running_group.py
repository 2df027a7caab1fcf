"""A group in a sampler worker: its conversations, and the episodes that run them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from itertools import chain

from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.rewards.failures import FailureCount, RewardFailure
from rpg_megatron.rewards.reward import Score, Scorer
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.episode import EpisodeResult, EpisodeTask
from rpg_megatron.rollout.episode_pool import Attempt, EpisodeRunner
from rpg_megatron.rollout.gateway import Gateway
from rpg_megatron.rollout.groups import GroupTask


class RunningGroup:
    """A group, complete or not. For one event loop."""

    def __init__(self, task: GroupTask):
        self.task = task
        self.conversations: list[Conversation] = []
        """Its responses. Missing turns may come from any engine, because seeds determine them."""
        self.changed = asyncio.Event()
        """Set when an episode asks for a turn or ends, an engine has answered, or the group was dropped."""
        self.dropped = False
        self.grading: asyncio.Task[None] | None = None
        self.graded: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self.failures = FailureCount(task.set, 0, task.samples)
        self._episodes: list[asyncio.Task[EpisodeResult]] = []

    def start(
        self, episode: EpisodeRunner, codec: TextCodec, scorer: Scorer, vocab: int, gateway: Gateway | None
    ) -> None:
        """Start the episode of each response. vocab: number of the model's tokens. gateway: None, if the
        episode is the default one.
        """
        task, prompt = self.task, tuple(self.task.prompt.tolist())
        text, row = "", None
        if episode.settings is not None:  # the default one reads neither
            inputs = json.loads(task.context) if task.context else {}
            text, row = inputs.get("prompt") or codec.decode(task.prompt.tolist()), inputs.get("row")
        max_turns = episode.settings.max_turns if episode.settings else None
        keys = [""] * task.samples

        def begin(number: int) -> Attempt:
            conversation = Conversation(task, number, prompt, vocab, codec, self.changed.set, max_turns)
            if number < len(self.conversations):
                self.conversations[number] = conversation
            else:
                self.conversations.append(conversation)
            if gateway:
                gateway.end(keys[number])
                keys[number] = gateway.open(conversation)
            inputs = EpisodeTask(
                prompt=prompt,
                text=text,
                answer=task.answer,
                row=row,
                max_tokens=task.max_tokens,
                seed=task.seed + number,
                held_out=task.set,
                encode=lambda text: tuple(codec.encode(text)),
                decode=lambda tokens: codec.decode(list(tokens)),
                base_url=gateway.base_url if gateway else "",
                api_key=keys[number],
            )
            return Attempt(inputs, conversation, partial(_score, conversation, scorer))

        async def run(number: int, attempt: Attempt) -> EpisodeResult:
            attempts = chain([attempt], iter(lambda: begin(number), None))
            try:
                result = await episode.run(attempts)
            finally:
                if gateway:
                    gateway.end(keys[number])
            ended = self.conversations[number]
            ended.discard()
            raised = result.failure is not None and result.failure.kind == "error"
            if raised and ended.truncated and ended.sampled:
                result = EpisodeResult()  # it raised what it was told: that no token or turn is left
            result = result._replace(metrics={**result.metrics, **ended.counts})
            if not ended.sampled:
                if result.failure is None:
                    full = ": its first prompt leaves no token of rollout.max_response_tokens"
                    detail = "it ended without a turn of the policy" + full * ended.truncated
                    failure = RewardFailure(episode.name, "error", detail)
                    result = result._replace(reward=None, failure=failure)
                await begin(number).conversation.generate(prompt, 1)  # a response has at least one token
            return result

        for number in range(task.samples):
            running = asyncio.create_task(run(number, begin(number)))
            running.add_done_callback(self._on_end)
            self._episodes.append(running)

    @property
    def complete(self) -> bool:
        """Whether all episodes have ended, or one has failed."""
        if self.graded.done():
            return True
        return all(e.done() for e in self._episodes) or any(map(_has_failed, self._episodes))

    def take_due(self, limit: int) -> list[list[Conversation]]:
        """Conversations that wait for a turn, in requests: equal first turns go together, up to ``limit``."""
        requests: list[list[Conversation]] = []
        for conversation in self.conversations:
            if not conversation.is_due:
                continue
            conversation.requested = True
            last = requests[-1] if requests else []
            if last and len(last) < limit and conversation.continues(last[-1]):
                last.append(conversation)
            else:
                requests.append([conversation])
        return requests

    def results(self) -> list[EpisodeResult]:
        """How the episodes have ended. The group must be complete. Raises the error of an episode."""
        for episode in filter(_has_failed, self._episodes):
            self.drop()
            episode.result()
        return [episode.result() for episode in self._episodes]

    def drop(self) -> None:
        """End the episodes."""
        self.dropped = True
        for episode in self._episodes:
            episode.cancel()
        self.changed.set()

    def _on_end(self, episode: asyncio.Task[EpisodeResult]) -> None:
        _has_failed(episode)  # reads the exception: asyncio logs one that is never read
        self.changed.set()


def _has_failed(episode: asyncio.Task[EpisodeResult]) -> bool:
    return episode.done() and not episode.cancelled() and episode.exception() is not None


async def _score(conversation: Conversation, scorer: Scorer, text: str | None = None) -> Score:
    """``episode.ScoreText``."""
    task, response = conversation.task, conversation.response()
    if text is not None:
        response = response._replace(text=text, opened=False)
    with conversation.waiting():
        (result,) = await scorer.score(
            [response], task.answer, task.context, first_only=task.correctness_only
        )
    conversation.failures += result.failures
    return result

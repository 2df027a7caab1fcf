"""A group in a sampler worker: its conversations, and the episodes that run them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.rewards.reward import Score, Scorer
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.episode import (
    Episode,
    EpisodeTask,
    NamedEpisode,
    TokenLimit,
    own_score,
)
from rpg_megatron.rollout.gateway import Gateway
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.system.custom_code import describe_error


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
        self._episodes: list[asyncio.Task[Score | None]] = []

    def start(
        self, episode: NamedEpisode, codec: TextCodec, scorer: Scorer, vocab: int, gateway: Gateway | None
    ) -> None:
        """Start the episode of each response. vocab: number of the model's tokens. gateway: None, if the
        episode is the default one.
        """
        task, prompt = self.task, tuple(self.task.prompt.tolist())
        text, row = "", None
        if episode.path:  # the default one reads neither
            inputs = json.loads(task.context) if task.context else {}
            text, row = inputs.get("prompt") or codec.decode(task.prompt.tolist()), inputs.get("row")
        for number in range(task.samples):
            conversation = Conversation(task, number, prompt, vocab, codec, self.changed.set)
            key = gateway.open(conversation) if gateway else ""
            episode_task = EpisodeTask(
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
                api_key=key,
            )
            self.conversations.append(conversation)
            running = asyncio.create_task(_run(episode, episode_task, conversation, scorer))
            running.add_done_callback(self._on_end)
            if gateway:
                running.add_done_callback(partial(gateway.end, key))
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

    def rewards(self) -> list[Score] | None:
        """The rewards that the episodes set; None: they set none. The group must be complete.

        Raises the error of an episode, and UserError if only some have a reward.
        """
        for episode in filter(_has_failed, self._episodes):
            self.drop()
            episode.result()
        results = [episode.result() for episode in self._episodes]
        scores = [
            score._replace(failures=conversation.failures)
            for score, conversation in zip(results, self.conversations, strict=True)
            if score is not None
        ]
        if scores and (len(scores) < len(results) or len({tuple(score.parts) for score in scores}) > 1):
            raise UserError(
                f"rollout.episode: the episodes of prompt {self.task.prompt_id} return rewards of different "
                "kinds; return for every response a number, or the result of score, or no reward"
            )
        return scores or None

    def drop(self) -> None:
        """End the episodes."""
        self.dropped = True
        for episode in self._episodes:
            episode.cancel()
        self.changed.set()

    def _on_end(self, episode: asyncio.Task[Score | None]) -> None:
        _has_failed(episode)  # reads the exception: asyncio logs one that is never read
        self.changed.set()


def _has_failed(episode: asyncio.Task[Score | None]) -> bool:
    return episode.done() and not episode.cancelled() and episode.exception() is not None


async def _run(
    episode: NamedEpisode, inputs: EpisodeTask, conversation: Conversation, scorer: Scorer
) -> Score | None:
    """Run an episode; returns its reward, if it sets one. Raises UserError, which names its file and line."""
    task = conversation.task

    async def score(text: str | None = None) -> Score:
        response = conversation.response() if text is None else conversation.response()._replace(text=text)
        (result,) = await scorer.score(
            [response], task.answer, task.context, first_only=task.correctness_only
        )
        conversation.failures += result.failures
        return result

    try:
        try:
            outcome: Any = await episode.function(inputs, conversation.generate, score)
        except TokenLimit:
            outcome = Episode()
        if not isinstance(outcome, Episode):
            raise TypeError(f"it returned {type(outcome).__name__} instead of an Episode")
        if not conversation.sampled:
            raise ValueError("it ended without a turn of the policy")
        return None if outcome.reward is None else own_score(outcome.reward)
    except Exception as e:
        error: BaseException = e
    except asyncio.CancelledError as e:
        if (current := asyncio.current_task()) is None or current.cancelling():
            raise
        error = e  # its own
    problem = describe_error(error, episode.path)
    raise UserError(
        f"rollout.episode: {episode.path} {problem} (prompt {task.prompt_id}, response {conversation.number})"
    ) from error

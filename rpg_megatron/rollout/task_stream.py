"""Turns the stream of training prompts into group tasks, with tickets, seeds and token limits."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rpg_megatron.config import Settings
from rpg_megatron.data.prompt_stream import Prompts, PromptStream
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.streamed_prompts import StreamedPrompts
from rpg_megatron.engine.command import context_length
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import seed_of


class TaskStream:
    """Stream of group tasks, in the order of the prompts."""

    def __init__(self, settings: Settings, prompts: Prompts | StreamedPrompts):
        """prompts: of the training data."""
        self._settings, self._context = settings, context_length(settings)
        if isinstance(prompts, StreamedPrompts):
            self._stream: StreamedPrompts | PromptStream = prompts
        else:
            data = settings.data
            self._stream = PromptStream(prompts, settings.seed, data.weights, shuffle=data.shuffle)
        self._next_ticket = 0

    def take(self, count: int, start: int, step: int, version: int) -> list[GroupTask]:
        """The next ``count`` groups of a step. start: index of the first one in the step."""
        prompts = self._stream.take(count)
        return [self._task(p, self.new_ticket(), start + i, step, version) for i, p in enumerate(prompts)]

    def take_ahead(self, version: int) -> tuple[GroupTask, dict[str, Any]]:
        """The next group, for weights ``version`` or newer, and the position after it.

        Seeds are derived from the ticket; without dynamic sampling they equal those of ``take``.
        """
        ticket, (prompt,) = self.new_ticket(), self._stream.take(1)
        step, index = divmod(ticket, self._settings.rollout.prompts_per_step)
        task = self._task(prompt, ticket, index, step + 1, version)
        return msgspec.structs.replace(task, interruptible=True), self.position()

    def carried(self, prompt_id: int, ticket: int) -> GroupTask:
        """The task of a group that was already sampled."""
        return self._task(self._stream.find(prompt_id), ticket, 0, 0, 0)

    @property
    def prompts(self) -> Prompts:
        """The prompts of the training data; of a source that is asked during the run, the first ones."""
        return self._stream.prompts

    def new_ticket(self) -> int:
        """The next ticket."""
        self._next_ticket += 1
        return self._next_ticket - 1

    def position(self) -> dict[str, Any]:
        """Position in the data, JSON-serialisable; ``sign`` makes it a state for a checkpoint."""
        return {"stream": self._stream.position(), "next_ticket": self._next_ticket}

    async def ready(self) -> None:
        """Wait for ``Prompts.fingerprints``."""
        await asyncio.shield(asyncio.wrap_future(self._stream.prompts.fingerprints))

    def sign(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position as a state for a checkpoint. Call ``ready`` before."""
        return position | {"stream": self._stream.sign(position["stream"])}

    def restore(self, position: dict[str, Any]) -> None:
        """Restore a state. Call ``ready`` before. Raises UserError if the data has changed."""
        self._stream.restore(position["stream"])
        self._next_ticket = position.get("next_ticket", 0)

    def _task(self, prompt: Prompt, ticket: int, index: int, step: int, version: int) -> GroupTask:
        rollout = self._settings.rollout
        return GroupTask(
            ticket,
            prompt.id,
            prompt.tokens,
            prompt.answer,
            rollout.samples_per_prompt,
            seed_of(self._settings.seed, "rollout", step, index, prompt.id),
            min(rollout.max_response_tokens, self._context - len(prompt.tokens)),
            version,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.min_p,
            context=prompt.context,
        )

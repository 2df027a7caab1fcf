"""Turns the stream of training prompts into group tasks, with tickets, seeds and token limits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

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
        self._recent: list[tuple[Prompt, dict[str, Any]]] = []
        """Prompts that were taken since the last ``rewind``, each with the position after it."""
        self._again: deque[tuple[Prompt, dict[str, Any]]] = deque()
        """The same of prompts that come again."""

    @property
    def prompts(self) -> Prompts:
        """The prompts of the training data; of a source that is asked during the run, the first ones."""
        return self._stream.prompts

    def take(self, version: int) -> tuple[GroupTask, dict[str, Any]]:
        """The next group, for weights ``version`` or newer, and the position after it.

        Its seeds follow from its ticket.
        """
        if self._again:
            prompt, position = self._again.popleft()
        else:
            (prompt,) = self._stream.take(1)
            position = {"stream": self._stream.position(), "next_ticket": self._next_ticket + 1}
        if not self._settings.rollout.ahead:
            self._recent.append((prompt, position))
        ticket = self._next_ticket
        self._next_ticket += 1
        rollout = self._settings.rollout
        step, index = divmod(ticket, rollout.prompts_per_step)
        task = GroupTask(
            ticket,
            prompt.id,
            prompt.tokens,
            prompt.answer,
            rollout.samples_per_prompt,
            seed_of(self._settings.seed, "rollout", step + 1, index, prompt.id),
            min(rollout.max_response_tokens, self._context - len(prompt.tokens)),
            version,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            interruptible=rollout.interrupted,
            context=prompt.context,
        )
        return task, position

    def rewind(self, position: dict[str, Any]) -> None:
        """Go back to a position: the groups after it come again. Only with ``rollout.ahead`` 0, and not to
        before the position of the last call.
        """
        self._next_ticket = position["next_ticket"]
        again = [entry for entry in self._recent if entry[1]["next_ticket"] > self._next_ticket]
        self._again.extendleft(reversed(again))
        self._recent.clear()

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
        self._recent.clear()
        self._again.clear()
        self._stream.restore(position["stream"])
        self._next_ticket = position.get("next_ticket", 0)

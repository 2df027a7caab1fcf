"""The batches of a fine-tuning run: recorded conversations; engines sample evaluations only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.data.batch_index import BatchIndex, index_of
from rpg_megatron.data.conversations import Conversations, read_conversations, to_trajectory
from rpg_megatron.data.prompt_stream import PromptStream
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.rollout.sampler_client import RolloutBatch
from rpg_megatron.rollout.seeds import stop_tokens


class RecordedBatches:
    """What ``SamplerRequests`` asks of rollouts. A ticket is the index of a row in the data."""

    def __init__(self, settings: Settings, tokenizer: Any):
        """Read the conversations of ``sft``. Raises UserError."""
        assert settings.sft is not None
        vocab = read_model_shape(settings.model.path).vocab_size
        self._sft, data = settings.sft, settings.sft.data
        more = settings.rollout.stop_token_ids
        stops = stop_tokens(settings.model.path, tokenizer, more, chats=settings.chats)
        self._rows: list[Conversations] = [
            read_conversations(part, tokenizer, key, stops=stops, end=next(iter(more), None), vocab=vocab)
            for key, part in self._sft.parts
        ]
        """Training rows, and those held out."""
        weights = [1.0] if data.rollouts is not None else data.weights
        self._order = PromptStream(
            self._rows[0], settings.seed, weights, shuffle=data.shuffle, key="sft.data"
        )
        self._taken = 0
        total = self._sft.total(len(self._rows[0]))
        self._total = settings.training.steps * self._sft.batch_size if total is None else total

    async def rollout(self, step: int, version: int) -> RolloutBatch:
        """The next ``sft.batch_size`` rows; fewer at the end of the last epoch."""
        started = time.monotonic()
        rows = self._order.take(max(1, min(self._sft.batch_size, self._total - self._taken)))
        self._taken += len(rows)
        index = _index(rows)
        metrics = {
            "sft/epoch": self._taken / len(self._rows[0]),
            "sft/tokens": float(index.sampled.sum()),
            "sft/length_mean": float((index.prompt_length + index.response_length).mean()),
        }
        return RolloutBatch(index, metrics, time.monotonic() - started, await self.state())

    async def held_out(self) -> RolloutBatch:
        """The held-out conversations. Raises UserError if there are none."""
        if len(self._rows) < 2:
            raise UserError("there are no held-out conversations; set sft.heldout")
        rows = self._rows[1]
        return RolloutBatch(_index(rows.fetch(range(len(rows))), held_out=True))

    async def fetch(self, tickets: list[int], rows: list[int]) -> list[Trajectory]:
        """Training rows by index; held-out ones by -1 - index."""
        trajectories: list[Trajectory] = []
        for ticket in tickets:
            held_out = ticket < 0
            trajectories += map(
                to_trajectory, self._rows[held_out].fetch([-1 - ticket if held_out else ticket])
            )
        return trajectories

    async def state(self) -> dict[str, Any]:
        """Position in the data."""
        return {"stream": self._order.state(), "taken": self._taken}

    async def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned. Raises UserError if it is not of a fine-tuning run."""
        if "taken" not in state:
            raise UserError(
                "the checkpoint is not of a fine-tuning run; to train its weights on conversations, set "
                "model.path to its Hugging Face export"
            )
        self._order.restore(state["stream"])
        self._taken = state["taken"]


def _index(rows: Sequence[Prompt], *, held_out: bool = False) -> BatchIndex:
    index = index_of(replace(to_trajectory(row), group=place) for place, row in enumerate(rows))
    tickets = np.array([row.id for row in rows], np.int64)
    return replace(index, ticket=-1 - tickets if held_out else tickets)

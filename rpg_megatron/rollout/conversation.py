"""A response while it is sampled: its tokens so far, and the turn that its episode waits for.

It hides from the episode how a turn is sampled: by which engine, in how many pieces, with which versions of
the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from rpg_megatron.data.trajectory import NOT_SAMPLED, Tokens, Trajectory
from rpg_megatron.engine.client import Sample
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.reward import Response, Score
from rpg_megatron.rollout.episode import TokenLimit, Turn
from rpg_megatron.rollout.groups import GroupTask


class Conversation:
    """One response of a group. For one event loop."""

    def __init__(
        self,
        task: GroupTask,
        number: int,
        prompt: tuple[int, ...],
        vocab: int,
        decode: Callable[[list[int]], str],
        on_request: Callable[[], None],
    ):
        """number: index of the response in its group. prompt: ``task.prompt``. vocab: number of the model's
        tokens. on_request: called when a turn is asked for.
        """
        self.task, self.number = task, number
        self.pieces: list[Sample] = []
        """The response so far. Each piece was sampled by one version of the weights, or by none."""
        self.length = 0
        """Tokens of ``pieces``."""
        self.truncated = False
        """Whether the token limit left no room for another turn."""
        self.requested = False
        """Whether an engine is working on the turn."""
        self.failures: tuple[RewardFailure, ...] = ()
        """Of the reward, when the episode asked for it."""
        self._prompt, self._vocab, self._decode, self._on_request = prompt, vocab, decode, on_request
        self.turn: asyncio.Future[Turn] | None = None
        """The last turn that was asked for."""
        self._start = self._end = 0

    @property
    def is_due(self) -> bool:
        """Whether a turn is to be sent to an engine."""
        return self.turn is not None and not self.turn.done() and not self.requested

    def continues(self, other: Conversation) -> bool:
        """Whether its turn can be in the same request as the one before: both are equal first turns."""
        follows = self.number == other.number + 1
        return follows and not self.length and not other.length and self.room == other.room

    @property
    def sampled(self) -> int:
        """Tokens of the response so far that the policy sampled."""
        return sum(len(piece.tokens) for piece in self.pieces if piece.version != NOT_SAMPLED)

    @property
    def room(self) -> int:
        """Token limit of the rest of the turn."""
        return self._end - self.length

    @property
    def tokens(self) -> Tokens:
        """The response so far, int32 [R]."""
        return np.concatenate([np.zeros(0, np.int32), *(piece.tokens for piece in self.pieces)])

    @property
    def context(self) -> Tokens:
        """Prompt and response so far, int32 [P + R]."""
        return np.concatenate([self.task.prompt, *(piece.tokens for piece in self.pieces)])

    @property
    def computed(self) -> int:
        """Number of tokens whose routes are known: all up to the last but one that was sampled."""
        end = self.length
        for piece in reversed(self.pieces):
            if piece.version != NOT_SAMPLED:
                return len(self.task.prompt) + end - 1
            end -= len(piece.tokens)
        return 0

    async def generate(self, tokens: Sequence[int], max_tokens: int | None = None) -> Turn:
        """See ``episode.Generate``. Raises ValueError if the tokens do not continue the conversation."""
        if self.turn is not None and not self.turn.done():
            raise ValueError("generate is called while it samples another turn of the response; await that")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate is called with max_tokens {max_tokens}; at least 1 is needed")
        added = self._added(tokens)
        remaining = self.task.max_tokens - self.length - len(added)
        if remaining < 1:
            self.truncated = True
            raise TokenLimit(f"the response has reached its limit of {self.task.max_tokens} tokens")
        self.truncated, before = False, (len(self.pieces), self.length)
        if len(added):
            self._append(Sample(added, np.zeros(len(added), np.float32), "", NOT_SAMPLED))
        self._start, self._end = self.length, self.length + min(remaining, max_tokens or remaining)
        self.turn = asyncio.get_running_loop().create_future()
        self._on_request()
        try:
            return await self.turn
        except asyncio.CancelledError:  # by a time limit of the episode: the turn is not in the response
            del self.pieces[before[0] :]
            self.length = before[1]
            raise

    def add(self, sample: Sample) -> None:
        """Add what an engine sampled: the rest of the turn, or the part before a weight update."""
        if sample.finish != "abort" or len(sample.tokens):
            self._append(sample)
        if sample.finish != "abort" and self.turn is not None and not self.turn.done():
            whole, start = self.context, len(self.task.prompt) + self._start
            self.turn.set_result(Turn(whole[:start], whole[start:], sample.finish, self._decode))

    def response(self) -> Response:
        """The response so far, for the reward."""
        tokens, last = self.tokens, self.pieces[-1].finish if self.pieces else ""
        finish = "length" if self.truncated else last or "stop"
        return Response(self._decode(tokens.tolist()), tokens, finish, self.sampled)

    def trajectory(self, response: Response, score: Score) -> Trajectory:
        """The whole response with its score."""
        task, sampled = self.task, [p.version != NOT_SAMPLED for p in self.pieces]
        versions = [task.version if p.version is None else p.version for p in self.pieces]
        lengths = [len(p.tokens) for p in self.pieces]
        return Trajectory(
            prompt_id=task.prompt_id,
            sample=self.number,
            group=task.ticket,
            prompt=task.prompt,
            response=response.tokens,
            behaviour=np.concatenate([p.logprobs for p in self.pieces]),
            versions=np.repeat(np.array(versions, np.int32), lengths),
            finish=response.finish,
            text=response.text,
            reward=score.reward,
            correct=score.correct,
            parts=score.parts,
            answer=task.answer,
            extracted=score.extracted,
            reason=score.reason,
            seed=task.seed + self.number,
            ticket=task.ticket,
            routes=np.concatenate([p.routes for p, s in zip(self.pieces, sampled, strict=True) if s]),
            mask=np.repeat(np.array(sampled, bool), lengths),
        )

    def _append(self, piece: Sample) -> None:
        self.pieces.append(piece)
        self.length += len(piece.tokens)

    def _added(self, tokens: Sequence[int]) -> Tokens:
        """The tokens after those of the conversation so far."""
        if tokens is self._prompt and not self.pieces:
            return np.zeros(0, np.int32)
        try:
            ids = np.asarray(tokens)
        except ValueError:  # lists of different lengths
            ids = np.zeros(1)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError("generate is called with something that is no list of token ids")
        known = self.context
        same = min(len(ids), len(known))
        different = np.flatnonzero(ids[:same] != known[:same])
        if len(different) or len(ids) < len(known):
            place = int(different[0]) if len(different) else len(ids)
            raise ValueError(
                f"generate is called with tokens that do not begin with the {len(known)} tokens of the "
                f"conversation so far (they differ at token {place}); append to turn.context, and do not "
                "encode its text again"
            )
        added = ids[same:]
        if len(added) and not 0 <= added.min() <= added.max() < self._vocab:
            wrong = int(added[(added < 0) | (added >= self._vocab)][0])
            raise ValueError(f"generate is called with token {wrong}; the model has {self._vocab} tokens")
        return added.astype(np.int32)

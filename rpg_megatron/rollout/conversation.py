"""A response while it is sampled: its rows so far, and the turn that its episode waits for.

It hides from the episode how a turn is sampled: by which engine, in how many pieces, with which versions of
the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.data.trajectory import NOT_SAMPLED, Tokens, Trajectory
from rpg_megatron.engine.client import Sample
from rpg_megatron.rewards.extraction import opens_thoughts
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.reward import Response, Score
from rpg_megatron.rollout.episode import TokenLimit, Turn, token_array
from rpg_megatron.rollout.groups import GroupTask

_MARK_TOKENS = 16
"""Tokens at the end of a prompt that may be the mark at which thoughts begin."""


class RetokenizedError(ValueError):
    """The tokens of a turn spell what was sampled, but are other tokens."""


class ConversationRow:
    """A prompt and what follows it: a sequence of the training batch."""

    def __init__(self, prompt: Tokens):
        self.prompt = prompt
        self.pieces: list[Sample] = []
        """What follows the prompt. Each piece was sampled by one version of the weights, or by none."""

    @property
    def length(self) -> int:
        """Tokens of ``pieces``."""
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def tokens(self) -> Tokens:
        """What follows the prompt, int32 [R]."""
        return np.concatenate([np.zeros(0, np.int32), *(piece.tokens for piece in self.pieces)])

    @property
    def context(self) -> Tokens:
        """All tokens, int32 [P + R]."""
        return np.concatenate([self.prompt, *(piece.tokens for piece in self.pieces)])

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(piece.tokens) for piece in self.pieces if piece.version != NOT_SAMPLED)

    @property
    def computed(self) -> int:
        """Number of tokens whose routes are known: all up to the last but one that was sampled."""
        end = self.length
        for piece in reversed(self.pieces):
            if piece.version != NOT_SAMPLED:
                return len(self.prompt) + end - 1
            end -= len(piece.tokens)
        return 0


class Conversation:
    """One response of a group. For one event loop.

    It has one row, unless its episode starts branches: each is a row of its own.
    """

    def __init__(
        self,
        task: GroupTask,
        number: int,
        prompt: tuple[int, ...],
        vocab: int,
        codec: TextCodec,
        on_request: Callable[[], None],
        max_turns: int | None = None,
    ):
        """number: index of the response in its group. prompt: ``task.prompt``. vocab: number of the model's
        tokens. on_request: called when a turn is asked for. max_turns: limit of turns; None: no limit.
        """
        self.task, self.number = task, number
        self.rows = [ConversationRow(task.prompt)]
        self.truncated = False
        """Whether a limit left no room for another turn."""
        self.requested = False
        """Whether an engine is working on the turn."""
        self.counts: dict[str, float] = {}
        """Metrics ``env/*`` of what clients sent to the gateway."""
        self.failures: tuple[RewardFailure, ...] = ()
        """Of the reward, when the episode asked for it."""
        self._prompt, self._vocab, self._codec, self._on_request = prompt, vocab, codec, on_request
        self._turns, self._max_turns = 0, max_turns
        self._waited, self._waiting_since, self._waiters = 0.0, 0.0, 0
        self._before: tuple[ConversationRow, int] | None = None
        """Of the last turn: the row of the turn before, and the pieces that its own row had."""
        self._open = False
        """Whether the last turn has not reached who asked for it, as far as is known."""
        self.turn: asyncio.Future[Turn] | None = None
        """The last turn that was asked for."""
        self.row = self.rows[0]
        """The row of the last turn."""
        self._start = self._end = self._first = 0

    @property
    def is_due(self) -> bool:
        """Whether a turn is to be sent to an engine."""
        return self.turn is not None and not self.turn.done() and not self.requested

    def continues(self, other: Conversation) -> bool:
        """Whether its turn can be in the same request as the one before: both are equal first turns."""
        follows = self.number == other.number + 1
        first = all(len(c.rows) == 1 and not c.row.length for c in (self, other))
        return follows and first and self.room == other.room

    @property
    def sampled(self) -> int:
        """Tokens of the response so far that the policy sampled."""
        return sum(row.sampled for row in self.rows)

    @property
    def room(self) -> int:
        """Token limit of the rest of the turn."""
        return self._end - self.row.length

    @property
    def place(self) -> int:
        """Where the rest of the turn begins, for its seed: no other place of the response has the same."""
        return (self.rows.index(self.row) << 32) + self.row.length

    async def generate(
        self, tokens: Sequence[int] | Tokens, max_tokens: int | None = None, *, branch: bool = False
    ) -> Turn:
        """See ``episode.Generate``. Raises ValueError if the tokens continue no row, and may not branch."""
        turn = await self.sample(tokens, max_tokens, branch=branch)
        self.confirm()
        return turn

    async def sample(self, tokens: Sequence[int] | Tokens, max_tokens: int | None, *, branch: bool) -> Turn:
        """``generate`` for a client that the turn has yet to reach: call ``confirm`` then, or ``discard``."""
        if self._open and self.turn is not None and not self.turn.cancelled():
            raise ValueError("generate is called while it samples another turn of the response; await that")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate is called with max_tokens {max_tokens}; at least 1 is needed")
        self.discard()
        row, added = self._row_of(tokens, branch)
        if self._turns == self._max_turns:
            self.truncated = True
            raise TokenLimit(f"the response has reached its limit of {self._turns} turns")
        remaining = self.limit - len(row.prompt) - row.length - len(added)
        if remaining < 1:
            raise self.full()
        self._before, self._open = (self.row, len(row.pieces)), True
        self.truncated, self.row = False, row
        if row not in self.rows:
            self.rows.append(row)
        if len(added):
            row.pieces.append(Sample(added, np.zeros(len(added), np.float32), "", NOT_SAMPLED))
        self._first = len(row.pieces)
        self._start, self._end = row.length, row.length + min(remaining, max_tokens or remaining)
        self.turn = asyncio.get_running_loop().create_future()
        self._turns += 1
        self._on_request()
        turn = self.turn
        try:
            with self.waiting():
                return await turn
        except asyncio.CancelledError:  # by a time limit of the episode
            if turn is self.turn:
                self.discard()
            raise

    def confirm(self) -> None:
        """The last turn has reached who asked for it: it stays in the response."""
        self._open = False

    def reopen(self) -> None:
        """The last turn has not reached who asked for it after all."""
        self._open = self._before is not None

    def discard(self) -> bool:
        """Remove the last turn, unless it was confirmed: what nobody got is not trained.

        Returns whether there was one.
        """
        if not self._open or self._before is None:
            return False
        if self.turn is not None and not self.turn.done():
            self.turn.cancel()
        row, (self.row, pieces), self._before, self._open = self.row, self._before, None, False
        del row.pieces[pieces:]
        if not row.pieces and row is not self.rows[0]:
            self.rows.remove(row)
        return True

    @property
    def limit(self) -> int:
        """Most tokens of a row."""
        return len(self.task.prompt) + self.task.max_tokens

    def full(self, what: str = "") -> TokenLimit:
        """The error of a turn for which there is no room: it truncates the response. what: fills it."""
        self.truncated = True
        reason = f" ({what} cannot leave room for a turn)" if what else ""
        return TokenLimit(f"the response has reached its limit of {self.task.max_tokens} tokens{reason}")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the episode waits for others: ``time_waited`` includes it."""
        clock = asyncio.get_running_loop().time
        if not self._waiters:
            self._waiting_since = clock()
        self._waiters += 1
        try:
            yield
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._waited += clock() - self._waiting_since

    @property
    def time_waited(self) -> float:
        """Seconds in which the episode waited for turns and rewards."""
        now = asyncio.get_running_loop().time()
        return self._waited + (now - self._waiting_since if self._waiters else 0.0)

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise RetokenizedError if the tokens of a turn's prompt encode again what was sampled."""
        contexts = [row.context for row in self.rows if row.sampled]
        others = [known for known in contexts if not np.array_equal(tokens[: len(known)], known)]
        text = self._codec.decode_all(tokens.tolist()) if others else ""
        for known in others:
            if text.startswith(self._codec.decode_all(known.tolist())):
                raise RetokenizedError(
                    "the tokens spell what was sampled, but are other tokens; send those that were sampled, "
                    "and do not encode their text again"
                )

    def add(self, sample: Sample) -> None:
        """Add what an engine sampled: the rest of the turn, or the part before a weight update."""
        if self.turn is None or self.turn.done():  # the episode has given it up
            return
        if sample.finish != "abort" or len(sample.tokens):
            self.row.pieces.append(sample)
        if sample.finish != "abort":
            whole, start = self.row.context, len(self.row.prompt) + self._start
            logprobs = np.concatenate([piece.logprobs for piece in self.row.pieces[self._first :]])
            turn = Turn(whole[:start], whole[start:], sample.finish, logprobs, self._codec.decode)
            self.turn.set_result(turn)

    def response(self) -> Response:
        """The response so far, for the reward: the row of the last turn, which has the whole conversation."""
        tokens, last = self.row.tokens, self.row.pieces[-1].finish if self.row.pieces else ""
        finish = "length" if self.truncated else last or "stop"
        opened = opens_thoughts(self._codec.decode_all(self.row.prompt[-_MARK_TOKENS:].tolist()))
        return Response(self._codec.decode(tokens.tolist()), tokens, finish, self.sampled, opened)

    def trajectories(self, response: Response, score: Score) -> list[Trajectory]:
        """The rows with tokens that the policy sampled, with the score; that of the last turn is the last."""
        rows = sorted((row for row in self.rows if row.sampled), key=lambda row: row is self.row)
        return [self._trajectory(branch, row, response, score) for branch, row in enumerate(rows)]

    def _trajectory(self, branch: int, row: ConversationRow, response: Response, score: Score) -> Trajectory:
        task, sampled = self.task, [p.version != NOT_SAMPLED for p in row.pieces]
        versions = [task.version if p.version is None else p.version for p in row.pieces]
        lengths = [len(p.tokens) for p in row.pieces]
        tokens = response.tokens if row is self.row else row.tokens
        return Trajectory(
            prompt_id=task.prompt_id,
            sample=self.number,
            branch=branch,
            group=task.ticket,
            prompt=row.prompt,
            response=tokens,
            behaviour=np.concatenate([p.logprobs for p in row.pieces]),
            versions=np.repeat(np.array(versions, np.int32), lengths),
            finish=response.finish,
            text=response.text if row is self.row else self._codec.decode(tokens.tolist()),
            reward=score.reward,
            correct=score.correct,
            parts=score.parts,
            answer=task.answer,
            extracted=score.extracted,
            reason=score.reason,
            seed=task.seed + self.number,
            ticket=task.ticket,
            routes=np.concatenate([p.routes for p, s in zip(row.pieces, sampled, strict=True) if s]),
            mask=np.repeat(np.array(sampled, bool), lengths),
        )

    def _row_of(self, tokens: Sequence[int] | Tokens, branch: bool) -> tuple[ConversationRow, Tokens]:
        """The row that the tokens continue, or a new one; and the tokens after those of the row."""
        if tokens is self._prompt and len(self.rows) == 1 and not self.row.pieces:
            return self.row, np.zeros(0, np.int32)
        given = token_array(tokens)
        contexts = [(row, row.context) for row in self.rows]
        known = self.row.context
        continued = [(row, c) for row, c in contexts if np.array_equal(given[: len(c)], c)]
        if continued:
            row, known = max(continued, key=lambda pair: len(pair[1]))
        elif branch:
            task = self.task.prompt
            inside = np.array_equal(given[: len(task)], task)
            known = task if inside else given.astype(np.int32)
            row = ConversationRow(known)
        else:
            same = min(len(given), len(known))
            different = np.flatnonzero(given[:same] != known[:same])
            place = int(different[0]) if len(different) else len(given)
            raise ValueError(
                f"generate is called with tokens that do not begin with the {len(known)} tokens of the "
                f"conversation so far (they differ at token {place}); append to turn.context, and do not "
                "encode its text again; or pass branch=True, if the history is rewritten on purpose"
            )
        if len(given) and not 0 <= given.min() <= given.max() < self._vocab:
            wrong = int(given[(given < 0) | (given >= self._vocab)][0])
            raise ValueError(f"generate is called with token {wrong}; the model has {self._vocab} tokens")
        if not len(given):
            raise ValueError("generate is called without tokens")
        return row, given[len(known) :].astype(np.int32)

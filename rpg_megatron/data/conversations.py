"""Conversations to train on: tokenized, each with a mask of the trained tokens, in a file.

Rows come from chats (``conversation_encoder.py``) or from the rollouts of a run.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.conversation_encoder import ConversationEncoder, Row, fit_row
from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.rollout_files import list_rollouts
from rpg_megatron.data.row_store import StoredRow, keep_rows
from rpg_megatron.data.stored_problems import LeftOut
from rpg_megatron.data.trajectory import Tokens, Trajectory
from rpg_megatron.data.vocabulary import check_ids

logger = logging.getLogger(__name__)


class Conversations:
    """``Prompts`` of rows, whose tokens are in a file without a name."""

    def __init__(self, rows: Iterator[Row], left_out: LeftOut, deduplicate: bool) -> None:
        """left_out: what ``rows`` counts. Raises UserError if the disk is full."""
        self.left_out = left_out
        """Conversations that were dropped or cut, and rows that cannot be read, by reason."""
        self.trained = 0
        """Number of trained tokens."""
        self.fingerprints: Future[tuple[str, str]] = Future()
        """Of the prompts, and of their ``context``: see ``Prompts``."""
        self._digest, self._deduplicate = hashlib.blake2b(digest_size=16), deduplicate
        self._rows = keep_rows(self._encode(rows), _decode, "conversations")
        self.fingerprints.set_result((self._digest.hexdigest(), ""))

    def __len__(self) -> int:
        return len(self._rows)

    def sources(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Index of the source of each, int64 [prompts]."""
        return np.asarray(self._rows.sources)

    def fetch(self, indices: Sequence[int]) -> list[Prompt]:
        """See ``Prompts``; ``id`` is the index. All tokens of a row; those that are not trained are inverted,
        so negative.
        """
        return [Prompt(i, "", "", self._rows[i], self._rows.sources[i]) for i in indices]

    def _encode(self, rows: Iterator[Row]) -> Iterator[StoredRow]:
        seen = set[bytes]()
        for row in rows:
            data = np.where(row.mask, row.tokens, ~row.tokens).astype(np.int32).tobytes()
            same = hashlib.blake2b(data, digest_size=16).digest()
            if same in seen:
                self.left_out.counts["duplicate"] += 1
                continue
            if self._deduplicate:
                seen.add(same)
            self._digest.update(b"%d " % row.source + same)
            self.trained += int(row.mask.sum())
            yield StoredRow(data, row.source)


def _decode(data: bytes) -> Tokens:
    return np.frombuffer(data, np.int32)


def to_trajectory(row: Prompt) -> Trajectory:
    """A row of ``Conversations.fetch`` as a response whose trained tokens count as sampled."""
    mask = row.tokens >= 0
    tokens = np.where(mask, row.tokens, ~row.tokens)
    start = int(np.argmax(mask))
    return Trajectory(
        prompt_id=row.id,
        sample=0,
        prompt=tokens[:start],
        response=tokens[start:],
        behaviour=np.zeros(len(tokens) - start, np.float32),
        versions=np.zeros(len(tokens) - start, np.int32),
        finish="stop",
        text="",
        mask=mask[start:],
    )


def read_conversations(
    settings: ConversationSettings,
    tokenizer: Any,
    key: str,
    *,
    stops: Sequence[int],
    end: int | None = None,
    vocab: int | None = None,
) -> Conversations:
    """Read and tokenize all conversations.

    key: of ``settings``, for messages. stops: tokens that end a turn (``stop_tokens``). end: the token that
    ends a turn if the chat template writes none. vocab: rows of the model's embedding, if known. Raises
    UserError, with file and row of the first one of each kind, for conversations that cannot be trained
    unless ``malformed`` is skip, and as ``read_problems`` does; also if no conversation is left.
    """
    left_out = LeftOut()
    if settings.rollouts is not None:
        rows = _rollout_rows(settings, tokenizer, key, vocab, left_out.counts)
    else:
        readable = settings.model_copy(update={"malformed": "skip"})
        problems, left_out = read_problems_with_counts(readable, key)
        rows = ConversationEncoder(settings, tokenizer, key, stops, end, vocab).rows(problems, left_out)
    found = Conversations(rows, left_out, settings.deduplicate)
    bad = left_out.counts["malformed"]
    if bad and settings.malformed == "stop":
        skip = f"; {key}.malformed=skip leaves them out" if bad > 1 else ""
        raise UserError(
            (f"{key}: {bad:,} rows cannot be trained: " if bad > 1 else "") + left_out.first + skip
        )
    if not found:
        counts = ", ".join(f"{count:,} {why}" for why, count in left_out.counts.items()) or "none was found"
        remedy = "lower min_reward" if settings.rollouts is not None else f"raise {key}.max_tokens"
        example = f"; {left_out.first}" if left_out.first else ""
        raise UserError(f"{key}: no conversation is left to train on ({counts}); {remedy}{example}")
    return found


def _rollout_rows(
    settings: ConversationSettings, tokenizer: Any, key: str, vocab: int | None, left_out: Counter[str]
) -> Iterator[Row]:
    """The rows of a run's saved rollouts that are good enough."""
    run = settings.rollouts
    assert run is not None
    files = list_rollouts(run)
    if not files:
        raise UserError(f"{key}.rollouts: {run} has no saved rollouts; give the folder of a run")
    count = 0
    for file, t in iter_foreign_rollouts(files, run):
        if isinstance(t, UserError):
            raise t
        if t is None:
            continue
        good = t.correct if settings.min_reward is None else t.reward >= settings.min_reward
        if not good or t.finish != "stop" or not t.mask.any() or not len(t.prompt):
            left_out["not good enough" if not good else "truncated"] += 1
            continue
        where = f"{file}: group {t.group}, response {t.sample}"
        tokens = np.concatenate([t.prompt, t.response])
        if tokens.min() < 0:
            raise UserError(f"{where}: has negative token ids; restore the file")
        check_ids(tokens, vocab, where, tokenizer)
        if t.mask.all() and tokenizer.decode(t.response.tolist(), skip_special_tokens=True) != t.text:
            raise UserError(
                f"{where}: its tokens are another text with the tokenizer in model.path than in its run; "
                "train the model that sampled them, or one with the same tokenizer"
            )
        mask = np.concatenate([np.zeros(len(t.prompt), bool), t.mask])
        row = fit_row(tokens, mask, 0, settings, left_out)
        if row is None:
            continue
        yield row
        count += 1
        if count == settings.limit:
            return

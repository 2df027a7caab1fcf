"""Conversations to train on: tokenized, each with a mask of the trained tokens, in a file.

Rows come from chats (``conversation_encoder.py``) or from the rollouts of a run.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.conversation_encoder import ConversationEncoder, Row, fit_row
from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.rollout_files import list_rollouts
from rpg_megatron.data.stored_problems import LeftOut
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.data.vocabulary import check_ids

logger = logging.getLogger(__name__)


@dataclass
class Conversations:
    """``Prompts`` of rows, whose tokens are in a file without a name: 16 bytes of memory a row."""

    starts: array[int] = field(default_factory=lambda: array("q", [0]))
    """Offset of each row in the file, in tokens, and the end."""
    source_numbers: array[int] = field(default_factory=lambda: array("q"))
    trained: int = 0
    """Number of trained tokens."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Conversations that were dropped or cut, and rows that cannot be read, by reason."""
    fingerprints: Future[tuple[str, str]] = field(default_factory=Future)
    """See ``Prompts``."""

    def __post_init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  kept

    def __len__(self) -> int:
        return len(self.source_numbers)

    def sources(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """See ``Prompts``."""
        return np.array(self.source_numbers, np.int64)

    def fetch(self, indices: Sequence[int]) -> list[Prompt]:
        """See ``Prompts``; ``id`` is the index. All tokens of a row; those that are not trained are inverted,
        so negative.
        """
        prompts = []
        for index in indices:
            start, end = self.starts[index], self.starts[index + 1]
            self._file.seek(4 * start)
            tokens = np.frombuffer(self._file.read(4 * (end - start)), np.int32)
            prompts.append(Prompt(index, "", "", tokens, self.source_numbers[index]))
        return prompts

    def write(self, rows: Iterator[Row], deduplicate: bool = False) -> None:
        """Add all rows. Raises UserError if the disk is full."""
        digest, seen = hashlib.blake2b(digest_size=16), set[bytes]()
        try:
            for row in rows:
                data = np.where(row.mask, row.tokens, ~row.tokens).astype(np.int32).tobytes()
                same = hashlib.blake2b(data, digest_size=16).digest()
                if deduplicate and same in seen:
                    self.left_out.counts["duplicate"] += 1
                    continue
                if deduplicate:
                    seen.add(same)
                self._file.write(data)
                digest.update(b"%d " % row.source + same)
                self.starts.append(self.starts[-1] + len(row.tokens))
                self.source_numbers.append(row.source)
                self.trained += int(row.mask.sum())
            self._file.flush()
        except OSError as e:
            raise UserError(
                f"conversations cannot be kept in {tempfile.gettempdir()} ({e.strerror or e}); free disk "
                "space, or set TMPDIR to another folder"
            ) from None
        self.fingerprints.set_result((digest.hexdigest(), ""))


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
    found = Conversations()
    if settings.rollouts is not None:
        found.write(
            _rollout_rows(settings, tokenizer, key, vocab, found.left_out.counts), settings.deduplicate
        )
    else:
        problems, found.left_out = read_problems_with_counts(
            settings.model_copy(update={"malformed": "skip"}), key
        )
        encoder = ConversationEncoder(settings, tokenizer, key, stops, end, vocab)
        found.write(encoder.rows(problems, found.left_out), settings.deduplicate)
    bad = found.left_out.counts["malformed"]
    if bad and settings.malformed == "stop":
        skip = f"; {key}.malformed=skip leaves them out" if bad > 1 else ""
        raise UserError(
            (f"{key}: {bad:,} rows cannot be trained: " if bad > 1 else "") + found.left_out.first + skip
        )
    if not found:
        counts = (
            ", ".join(f"{count:,} {why}" for why, count in found.left_out.counts.items()) or "none was found"
        )
        remedy = "lower min_reward" if settings.rollouts is not None else f"raise {key}.max_tokens"
        example = f"; {found.left_out.first}" if found.left_out.first else ""
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

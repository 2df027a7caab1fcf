"""Conversations to train on: tokenized, each with a mask of the trained tokens, in a file.

A trained turn has the tokens, and follows the tokens, that the engines would see: the text before a turn is
the chat template's with its generation prompt, and is tokenized apart from the turn. A template may rewrite
earlier turns, as those of reasoning models do that leave out their thoughts; such a turn gets a row of its
own, which ends with it.
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
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.chat_template import Rendered, render_chats
from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts
from rpg_megatron.data.problems import read_problems_with_counts, warn_left_out
from rpg_megatron.data.prompts import Prompt, chat_template, template_variables
from rpg_megatron.data.rollout_files import list_rollouts
from rpg_megatron.data.stored_problems import Message, Problem
from rpg_megatron.data.trajectory import Mask, Tokens, Trajectory
from rpg_megatron.data.vocabulary import check_ids
from rpg_megatron.system.foreign_input import ForeignInputError

logger = logging.getLogger(__name__)

_AT_ONCE, _CHARACTERS = 500, 10_000_000
"""Conversations that are rendered and tokenized at a time, and about the most characters of their texts: a
chat is rendered for each of its turns."""


class Row(NamedTuple):
    """A sequence to train on."""

    tokens: Tokens
    """Token ids, int32 [T]."""
    mask: Mask
    """The trained tokens, bool [T]; not the first one, and the last one is trained."""
    source: int


@dataclass
class Conversations:
    """``Prompts`` of rows, whose tokens are in a file without a name: 16 bytes of memory a row."""

    starts: array[int] = field(default_factory=lambda: array("q", [0]))
    """Offset of each row in the file, in tokens, and the end."""
    source_numbers: array[int] = field(default_factory=lambda: array("q"))
    trained: int = 0
    """Number of trained tokens."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Conversations that were dropped or cut, by reason."""
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
                    self.left_out["duplicate"] += 1
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
    vocab: int | None = None,
) -> Conversations:
    """Read and tokenize all conversations; a warning says how many were left out.

    key: of ``settings``, for messages. stops: tokens that end a turn (``stop_tokens``). vocab: rows of the
    model's embedding, if known. Raises UserError, with file and row, for a conversation without a turn to
    train on, and as ``read_problems`` does; also if no conversation is left.
    """
    found = Conversations()
    if settings.rollouts is not None:
        found.write(_rollout_rows(settings, tokenizer, key, vocab, found.left_out), settings.deduplicate)
    else:
        problems, left_out, first_bad = read_problems_with_counts(settings, key)
        warn_left_out(left_out, first_bad, len(problems))
        encoder = _Encoder(settings, tokenizer, key, stops, vocab, found.left_out)
        found.write(encoder.rows(problems))
    if not found:
        counts = ", ".join(f"{count:,} {why}" for why, count in found.left_out.items()) or "none was found"
        remedy = "lower min_reward" if settings.rollouts is not None else f"raise {key}.max_tokens"
        raise UserError(f"{key}: no conversation is left to train on ({counts}); {remedy}")
    return found


class _Encoder:
    """Renders and tokenizes conversations."""

    def __init__(
        self,
        settings: ConversationSettings,
        tokenizer: Any,
        key: str,
        stops: Sequence[int],
        vocab: int | None,
        left_out: Counter[str],
    ):
        self._settings, self._tokenizer, self._key = settings, tokenizer, key
        self._stops, self._vocab, self._left_out = sorted(stops), vocab, left_out
        if settings.chat and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"{key}.chat: the model's tokenizer has no chat template; copy its chat_template.jinja into "
                f"the model's folder, or set {key}.chat to false"
            )
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = self._stops[0] if end is None else end

    def rows(self, problems: Sequence[Problem]) -> Iterator[Row]:
        """The rows of all conversations that are used."""
        for part in _parts(problems):
            chunk = [
                (problem, pieces)
                for problem, result in self._pieces(part)
                for pieces in (self._reject(result) if isinstance(result, UserError) else result)
            ]
            # A chat template adds the special tokens itself.
            first = self._encode([pieces[0] for _, pieces in chunk], special=not self._settings.chat)
            rest = iter(self._encode([text for _, pieces in chunk for text in pieces[1:]]))
            for (problem, pieces), ids in zip(chunk, first, strict=True):
                try:
                    row = self._row(problem, [ids, *(next(rest) for _ in pieces[1:])])
                except UserError as e:
                    self._reject(e)
                    continue
                if row is not None:
                    yield row

    def _reject(self, problem: UserError) -> list[Any]:
        """Count a malformed conversation, which has no rows; raises the error if it is to stop the run."""
        if self._settings.malformed == "stop":
            raise problem
        self._left_out["malformed"] += 1
        return []

    def _encode(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        ids: list[list[int]] = (
            self._tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        )
        return ids

    def _pieces(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, UserError | list[_Pieces]]]:
        """For each conversation the texts of its rows: alternating, not trained and trained."""
        planned: list[tuple[Problem, UserError | tuple[list[Message], list[int]]]] = []
        for problem in problems:
            try:
                planned.append((problem, self._turns(problem)))
            except UserError as e:
                planned.append((problem, e))
        if not self._settings.chat:
            for problem, plan in planned:
                if isinstance(plan, UserError):
                    yield problem, plan
                else:
                    yield problem, [[message.content for message in plan[0]]]
            return
        plans = [plan for _, plan in planned if not isinstance(plan, UserError)]
        before = self._render([chat[:turn] for chat, turns in plans for turn in turns], prompt=True)
        after = self._render([chat[: turn + 1] for chat, turns in plans for turn in turns], prompt=False)
        texts = zip(before, after, strict=True)
        for problem, plan in planned:
            if isinstance(plan, UserError):
                yield problem, plan
                continue
            pairs = [next(texts) for _ in plan[1]]
            try:
                yield problem, self._cut(problem, pairs)
            except UserError as e:
                yield problem, e

    def _turns(self, problem: Problem) -> tuple[list[Message], list[int]]:
        """The messages, and the places of the turns to train on. Without ``chat``: prompt and response."""
        settings, key = self._settings, self._key
        if isinstance(problem.prompt, str):
            chat = [Message("user", settings.template.replace("{prompt}", problem.prompt))]
        else:
            chat = list(problem.prompt)
            if not settings.chat:
                raise UserError(f"{problem.where}: is a chat; set {key}.chat to true")
        if not problem.answer and isinstance(problem.prompt, str):
            raise UserError(
                f"{problem.where}: has no response; name its column with {key}.answer_key, or with "
                f"{key}.prompt_key a column of chats"
            )
        if settings.system is not None and chat[0].role != "system":
            chat.insert(0, Message("system", settings.system))
        if problem.answer:
            chat.append(Message("assistant", problem.answer))
            return chat, [len(chat) - 1]
        turns = [place for place, message in enumerate(chat) if message.role == "assistant"]
        turns = [place for place in turns[-1 if settings.turns == "last" else 0 :] if chat[place].trained]
        if not turns or turns[0] == 0:
            what = "begins with the assistant" if turns else "has no turn of the assistant to train on"
            raise UserError(f"{problem.where}: the chat {what}; fix or remove the row")
        return chat, turns

    def _render(self, chats: list[list[Message]], *, prompt: bool) -> list[Rendered]:
        """The chats' texts. prompt: with the generation prompt."""
        variables = template_variables(self._tokenizer, self._settings) | {"add_generation_prompt": prompt}
        messages = [[message.plain for message in chat] for chat in chats]
        try:
            return list(render_chats(chat_template(self._tokenizer), variables, messages))
        except ForeignInputError as e:
            raise UserError(
                f"{self._key}.chat: the model's chat template cannot be used ({e}); correct it"
            ) from None

    def _cut(self, problem: Problem, pairs: list[tuple[Rendered, Rendered]]) -> list[_Pieces]:
        """The rows of a chat. pairs: texts before and with each trained turn."""
        turns = []
        for before, after in pairs:
            if error := before[1] or after[1]:
                raise UserError(f"{problem.where}: the chat template cannot render it: {error}")
            if not after[0].startswith(before[0]):
                raise UserError(
                    f"{problem.where}: the chat template renders a turn of the assistant otherwise than "
                    "after its generation prompt, so that the model would never continue with these tokens; "
                    f"set {self._key}.thinking as in the rollouts, or correct the template"
                )
            turns.append((before[0], after[0]))
        rows: list[_Pieces] = []
        while turns:
            before_text, text = turns.pop()
            spans = [(len(before_text), len(text))]
            while turns and text.startswith(turns[-1][1]):
                before_text, after_text = turns.pop()
                spans.append((len(before_text), len(after_text)))
            pieces, place = [], 0
            for start, end in reversed(spans):
                pieces += [text[place:start], text[start:end]]
                place = end
            rows.append(pieces)
        return rows[::-1]

    def _row(self, problem: Problem, encoded: list[list[int]]) -> Row | None:
        """A row from the tokens of its pieces. None: it is left out."""
        settings = self._settings
        if not settings.chat:
            encoded[1].append(self._end)
        masks = [np.full(len(ids), bool(place % 2)) for place, ids in enumerate(encoded)]
        for ids, mask in zip(encoded[1::2], masks[1::2], strict=True):
            if settings.chat and (ends := np.flatnonzero(np.isin(ids, self._stops)).tolist()):
                mask[ends[-1] + 1 :] = False  # what the template adds after the end of a turn
        tokens, mask = np.array([*chain.from_iterable(encoded)], np.int32), np.concatenate(masks)
        mask[:1] = False
        if not mask.any():
            raise UserError(f"{problem.where}: has no token to train on; fix or remove the row")
        check_ids(tokens, self._vocab, problem.where, self._tokenizer)
        return _fitting(tokens, mask, problem.source, settings, self._left_out)


def _parts(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    """The conversations, a few at a time."""
    part: list[Problem] = []
    size = 0
    for problem in problems:
        turns = 1 if isinstance(problem.prompt, str) else len(problem.prompt)
        part.append(problem)
        size += (len(problem.text) + len(problem.answer)) * turns
        if len(part) == _AT_ONCE or size > _CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


_Pieces = list[str]
"""Texts of a row: not trained, trained, and so on."""


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
        row = _fitting(tokens, mask, 0, settings, left_out)
        if row is None:
            continue
        yield row
        count += 1
        if count == settings.limit:
            return


def _fitting(
    tokens: Tokens, mask: Mask, source: int, settings: ConversationSettings, left_out: Counter[str]
) -> Row | None:
    """The row up to its last trained token, perhaps cut. None: it is too long, and counted."""
    end = int(np.flatnonzero(mask)[-1]) + 1
    if end > settings.max_tokens:
        trained = np.flatnonzero(mask[: settings.max_tokens])
        cut = settings.too_long == "cut" and len(trained) > 0
        left_out["cut" if cut else "too long"] += 1
        if not cut:
            return None
        end = int(trained[-1]) + 1
    return Row(tokens[:end], mask[:end], source)

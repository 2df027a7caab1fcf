"""Chats to token ids, with a mask of the tokens to train.

A trained turn has the tokens, and follows the tokens, that the engines would see: the text before a turn is
the chat template's with its generation prompt, and is tokenized apart from the turn. It ends with the token
that ends a turn in the template, at which rollouts stop. A template may rewrite earlier turns, as those of
reasoning models do that leave out their thoughts; such a turn gets a row of its own, which ends with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.chat_messages import Message, find_unwritten
from rpg_megatron.data.chat_rendering import render_messages
from rpg_megatron.data.chat_template import Rendered
from rpg_megatron.data.stored_problems import LeftOut, Problem
from rpg_megatron.data.tokenizer_file import added_after
from rpg_megatron.data.trajectory import Mask, Tokens
from rpg_megatron.data.vocabulary import check_ids

_AT_ONCE, _CHARACTERS = 500, 10_000_000
"""Conversations that are rendered and tokenized at a time, and about the most characters of their texts: a
chat is rendered for each of its turns."""
_MOST_MESSAGES = 60_000
"""Messages that are rendered for the turns of one chat: some seconds."""


class Row(NamedTuple):
    """A sequence to train on."""

    tokens: Tokens
    """Token ids, int32 [T]."""
    mask: Mask
    """The trained tokens, bool [T]; not the first one, and the last one is trained."""
    source: int


class _Chat(NamedTuple):
    """A conversation: its messages, and the places of the turns to train on, in order.

    Without ``chat``: prompt and response.
    """

    problem: Problem
    messages: list[Message]
    turns: list[int]


_Pieces = list[str]
"""Texts of a row: not trained, trained, and so on."""


class ConversationEncoder:
    """Renders and tokenizes conversations."""

    def __init__(
        self,
        settings: ConversationSettings,
        tokenizer: Any,
        key: str,
        stops: Sequence[int],
        end: int | None,
        vocab: int | None,
    ):
        """Parameters are those of ``read_conversations``. Raises UserError if there is no chat template."""
        self._settings, self._tokenizer, self._key = settings, tokenizer, key
        self._stops, self._end, self._vocab = set(stops), end, vocab
        self._eos: int = min(stops) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if settings.chat and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"{key}.chat: the model's tokenizer has no chat template; copy its chat_template.jinja into "
                f"the model's folder, or set {key}.chat to false"
            )

    def rows(self, problems: Sequence[Problem], left_out: LeftOut) -> Iterator[Row]:
        """The rows of all conversations that can be trained; the others are counted."""
        for part in _parts(problems):
            chunk = [(problem, pieces) for problem, rows in self._pieces(part, left_out) for pieces in rows]
            # A chat template adds the special tokens itself.
            first = self._encode([pieces[0] for _, pieces in chunk], special=not self._settings.chat)
            rest = iter(self._encode([text for _, pieces in chunk for text in pieces[1:]]))
            for (problem, pieces), ids in zip(chunk, first, strict=True):
                try:
                    rows = self._rows(problem, [ids, *(next(rest) for _ in pieces[1:])], left_out.counts)
                except UserError as e:
                    left_out.add(e)
                else:
                    yield from rows

    def _encode(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=special)["input_ids"]
        suffix = len(added_after(self._tokenizer)) if special else 0
        return [each[: len(each) - suffix] for each in ids]

    def _pieces(
        self, problems: Sequence[Problem], left_out: LeftOut
    ) -> Iterator[tuple[Problem, list[_Pieces]]]:
        """For each conversation that can be used, the texts of its rows."""
        chats = []
        for problem in problems:
            try:
                chats.append(self._chat(problem))
            except UserError as e:
                left_out.add(e)
        if not self._settings.chat:
            yield from ((chat.problem, [[message.text for message in chat.messages]]) for chat in chats)
            return
        before = self._render([(chat, turn) for chat in chats for turn in chat.turns], prompt=True)
        after = self._render([(chat, turn + 1) for chat in chats for turn in chat.turns], prompt=False)
        texts = zip(before, after, strict=True)
        for chat in chats:
            pairs = [next(texts) for _ in chat.turns]
            try:
                yield chat.problem, self._cut(chat, pairs)
            except UserError as e:
                left_out.add(e)

    def _chat(self, problem: Problem) -> _Chat:
        """The messages of a conversation, and its turns to train on. Raises UserError if there are none."""
        settings, key, prompt = self._settings, self._key, problem.prompt
        if isinstance(prompt, str):
            chat = [Message("user", settings.template.replace("{prompt}", prompt))]
        else:
            chat = list(prompt)
        if not settings.chat and (problem.completion or not isinstance(prompt, str)):
            raise UserError(f"{problem.where}: is a chat; set {key}.chat to true")
        if not problem.answer and not problem.completion and isinstance(prompt, str):
            raise UserError(
                f"{problem.where}: has no response; name its column with {key}.answer_key, or with "
                f"{key}.prompt_key a column of chats"
            )
        if settings.system is not None and chat[0].role != "system":
            chat.insert(0, Message("system", settings.system))
        if problem.answer:
            chat.append(Message("assistant", problem.answer))
            return _Chat(problem, chat, [len(chat) - 1])
        first = len(chat) if problem.completion else 0
        chat += problem.completion
        turns = [n for n, message in enumerate(chat) if n >= first and message.role == "assistant"]
        turns = [n for n in turns[-1 if settings.turns == "last" else 0 :] if chat[n].trained]
        if not turns or turns[0] == 0:
            what = "begins with the assistant" if turns else "has no turn of the assistant to train on"
            raise UserError(f"{problem.where}: the chat {what}; fix or remove the row")
        if empty := [n for n in turns if not chat[n].text.strip() and not chat[n].fields]:
            raise UserError(
                f"{problem.where}: message {empty[0] + 1} (assistant) is empty; fill it in or remove it"
            )
        if len(turns) * len(chat) > _MOST_MESSAGES:
            raise UserError(
                f"{problem.where}: the chat has {len(turns):,} turns to train among {len(chat):,} messages, "
                f"too many to render it for each; split it, or set {key}.turns to last"
            )
        return _Chat(problem, chat, turns)

    def _render(self, parts: list[tuple[_Chat, int]], *, prompt: bool) -> list[Rendered]:
        """The text of so many messages of each chat. prompt: with the generation prompt."""
        messages = [chat.messages[:count] for chat, count in parts]
        rows = [chat.problem for chat, _ in parts]
        return render_messages(
            messages, rows, self._settings, self._tokenizer, self._key, prompt=prompt, whole=False
        )

    def _cut(self, chat: _Chat, pairs: list[tuple[Rendered, Rendered]]) -> list[_Pieces]:
        """The rows of a chat. pairs: texts before and with each trained turn."""
        where, turns = chat.problem.where, []
        for place, (before, after) in zip(chat.turns, pairs, strict=True):
            if error := before[1] or after[1]:
                raise UserError(f"{where}: the chat template cannot render it: {error}")
            if not after[0].startswith(before[0]):
                raise UserError(
                    f"{where}: the chat template renders a turn of the assistant otherwise than after its "
                    "generation prompt, so that the model would never continue with these tokens; set "
                    f"{self._key}.thinking as in the rollouts, or correct the template"
                )
            plain = [message.plain for message in chat.messages[: place + 1]]
            last = place == chat.turns[-1]
            if lost := find_unwritten(plain if last else plain[-1:], after[0], after[0][len(before[0]) :]):
                raise UserError(
                    f"{where}: the chat template does not write {lost}; use one that does, or remove it"
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

    def _rows(self, problem: Problem, encoded: list[list[int]], left_out: Counter[str]) -> list[Row]:
        """The rows from the tokens of a row's pieces. A turn for which the template writes no end becomes the
        end of a row of its own.
        """
        rows: list[Row] = []
        masks = [np.full(len(ids), bool(place % 2)) for place, ids in enumerate(encoded)]
        for place in range(1, len(encoded), 2):
            after = encoded[place + 1] if place + 1 < len(encoded) else []
            end = self._find_end(encoded[place])
            if not self._stops.isdisjoint(encoded[place][:end]):
                raise UserError(
                    f"{problem.where}: the text of a turn has a token that ends a turn, as text; remove it"
                )
            if end is not None:
                masks[place][end + 1 :] = False  # what the template adds after the end of a turn
            elif after and after[0] in self._stops:
                masks[place + 1][0] = True  # the next message begins with the token that ends a turn
            else:
                tokens = [*encoded[: place + 1], [self._own_end(problem)]]
                rows += self._row(problem, tokens, [*masks[: place + 1], np.array([True])], left_out)
                for mask in masks[: place + 1]:
                    mask[:] = False  # trained now
        if any(mask.any() for mask in masks):
            rows += self._row(problem, encoded, masks, left_out)
        return rows

    def _row(
        self, problem: Problem, encoded: list[list[int]], masks: list[Mask], left_out: Counter[str]
    ) -> list[Row]:
        """A row, or none if it is left out."""
        tokens, mask = np.array([*chain.from_iterable(encoded)], np.int32), np.concatenate(masks)
        mask[:1] = False
        if not mask.any():
            raise UserError(f"{problem.where}: has no token to train on; fix or remove the row")
        check_ids(tokens, self._vocab, problem.where, self._tokenizer)
        row = fit_row(tokens, mask, problem.source, self._settings, left_out)
        return [] if row is None else [row]

    def _find_end(self, ids: Sequence[int]) -> int | None:
        """Place of the token that ends a turn: the first of those after its text. None: it has none."""
        end = None
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] in self._stops:
                end = place
            elif self._tokenizer.decode([ids[place]], skip_special_tokens=False).strip():
                break
        return end

    def _own_end(self, problem: Problem) -> int:
        """The token that ends a turn for which the template, or a response, writes none."""
        if not self._settings.chat:
            return self._eos
        if self._end is None:
            raise UserError(
                f"{problem.where}: the chat template writes no token at the end of the turn, so the model "
                "would not learn to stop; set rollout.stop_token_ids to the token that ends a turn, such as "
                f"[{self._eos}] ({self._tokenizer.decode([self._eos], skip_special_tokens=False)!r}), or let "
                "the template write one"
            )
        return self._end


def _parts(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    """The conversations, a few at a time."""
    part: list[Problem] = []
    size = 0
    for problem in problems:
        turns = 1 if isinstance(problem.prompt, str) else len(problem.prompt) + len(problem.completion)
        part.append(problem)
        size += (len(problem.text) + len(problem.answer)) * turns
        if len(part) == _AT_ONCE or size > _CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def fit_row(
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

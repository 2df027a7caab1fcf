"""Read and validate problems with reference answers. Needs neither torch nor a tokenizer."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rpg_megatron.config.data import DataSettings, SourceSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.boxed import last_box
from rpg_megatron.data.chat_messages import (
    Message,
    check_plain,
    read_chat,
    template_variables_of,
    without_nulls,
)
from rpg_megatron.data.presets import Preset, find_preset
from rpg_megatron.data.rows import read_rows, source_name, type_name
from rpg_megatron.data.stored_problems import Found, LeftOut, Problem, keep_problems

logger = logging.getLogger(__name__)

_PROBLEMS = (("prompt", "answer"),)
_CONVERSATIONS = (("messages", ""), ("prompt", "completion"), ("prompt", "response"))
"""Columns of problems and answers, and of conversations to train on; "": the chat has the response."""
_NOT_READ: tuple[str, ...] = (
    "functions",
    "function_call",
    "documents",
    "system",
    "images",
    "videos",
    "audios",
    "input_ids",
)
_NOT_READ += ("labels", "mask", "loss_mask", "train_mask", "weight", "weights", "parallel_tool_calls")
"""Columns that say what to train or what a chat has, of forms that are not read."""
_LINE = re.compile(r":\d+$")
"""End of the position of a row in JSON lines."""
_CHINESE = re.compile("[\u3400-\u9fff]")


MAX_UNUSED = 10_000
"""Number of rows of a source that is asked during the run of which none can be used, until the run ends."""


def read_problems(
    settings: DataSettings, key: str = "data", *, rows: bool = False, first: int | None = None
) -> Sequence[Problem]:
    """Read and validate all sources; a warning says how many rows were left out.

    key: of ``settings`` in the configuration, for messages. rows: keep all columns. first: how many problems
    to read of a source that is asked during the run (``data.streaming``); without it, such a source is a
    UserError. Raises UserError, with file, row (from 1) and fix, for a malformed row unless
    ``data.malformed`` is ``skip``, and for a source without any problem.
    """
    problems, left_out = read_problems_with_counts(settings, key, rows=rows, first=first)
    warn_left_out(left_out, len(problems))
    return problems


def warn_left_out(left_out: LeftOut, used: int) -> None:
    """Log how many rows were left out, if any. used: number of the others."""
    if left_out.counts:
        reasons = ", ".join(f"{count:,} {why}" for why, count in left_out.counts.items())
        example = f"; malformed: {left_out.first}" if left_out.first else ""
        logger.warning("prompts left out: %s (%d are used)%s", reasons, used, example)


def read_problems_with_counts(
    settings: DataSettings, key: str = "data", *, rows: bool = False, first: int | None = None
) -> Found:
    """The problems, and the rows that were left out.

    Parameters and errors are those of ``read_problems``. The problems are a list, or for more than
    ``IN_MEMORY`` a ``RowStore``. They are in the order of the rows, or of ``data.order_by``.
    """
    if settings.streaming:
        if first is None:
            raise UserError(
                f"{key}.streaming: all rows are needed here, and this source is asked for them during a run; "
                f"set {key}.streaming=false and {key}.limit"
            )
        left_out = LeftOut()
        problems = list(islice(iterate_problems(settings, key, rows, left_out), first))
        return problems, left_out
    return keep_problems(
        settings, key, rows, lambda left_out: iterate_problems(settings, key, rows, left_out)
    )


def iterate_problems(settings: DataSettings, key: str, rows: bool, left_out: LeftOut) -> Iterator[Problem]:
    """Yield the problems as they are read, and count the rows that are left out.

    Parameters and errors are those of ``read_problems``.
    """
    seen: set[bytes] = set()
    offset = 0
    for number, source in enumerate(settings.sources):
        at = f"{key}.mixture[{number}]" if settings.mixture else key
        preset = find_preset(source.preset, at) if source.preset is not None else None
        used, total = False, 0
        order = None if settings.order_by is None else (settings.order_by, f"{key}.order_by")
        pairs = _CONVERSATIONS if isinstance(settings, ConversationSettings) else _PROBLEMS
        for count, problem in _read_source(source, preset, number, offset, at, rows, order, pairs):
            total = count
            if isinstance(problem, UserError):
                if settings.malformed == "stop":
                    raise problem
                left_out.add(problem)
                continue
            if problem is None:
                left_out.counts["filtered"] += 1
                continue
            # Conversations are compared by their tokens: a prompt may have several responses.
            same = settings.deduplicate and not isinstance(settings, ConversationSettings)
            if same or (preset is not None and preset.repeated):
                digest = hashlib.blake2b(problem.identity.encode(), digest_size=16).digest()
                if digest in seen:
                    left_out.counts["duplicate"] += 1
                    continue
                seen.add(digest)
            used = True
            yield problem
        if not used:
            raise _no_problems(source, preset, total, left_out.first, key, at)
        offset += total


def first_problems(settings: DataSettings, key: str) -> Iterator[Problem]:
    """The first problem of each source, with its row; parameters as in ``read_problems``.

    Rows that cannot be read are left out. Raises UserError if a source cannot be read at all.
    """
    for number, source in enumerate(settings.sources):
        at = f"{key}.mixture[{number}]" if settings.mixture else key
        preset = find_preset(source.preset, at) if source.preset is not None else None
        for _, problem in _read_source(source, preset, number, 0, at, True):
            if isinstance(problem, Problem):
                yield problem
                break


def _no_problems(
    source: SourceSettings, preset: Preset | None, rows: int, bad: str, key: str, at: str
) -> UserError:
    name = source_name(source, preset)
    if rows:
        hint = f"; {bad}" if bad else f"; check {at}.where and {key}.deduplicate"
        return UserError(f"{name}: none of its {rows} rows can be used{hint}")
    prompt, answer = source.prompt_key or "prompt", source.answer_key or "answer"
    return UserError(
        f"{name}: contains no problems; it needs one JSON object per line, such as "
        f'{{"{prompt}": "What is 1+1?", "{answer}": "2"}}'
    )


def _read_source(
    source: SourceSettings,
    preset: Preset | None,
    number: int,
    offset: int,
    key: str,
    rows: bool,
    order: tuple[str, str] | None = None,
    pairs: tuple[tuple[str, str], ...] = _PROBLEMS,
) -> Iterator[tuple[int, Problem | UserError | None]]:
    """Yield, for each row, the number of rows so far and: its problem, its error, or None if filtered out.

    order: the column ``order_by``, and the key of that setting. pairs: columns without a preset.
    """
    fields: Fields | None = None
    used = 0  # rows up to the last one that can be used
    for index, where, row in read_rows(source, preset, key):
        if source.streaming and index - used == MAX_UNUSED:
            raise UserError(
                f"{where}: none of the last {MAX_UNUSED:,} rows can be used; check {key}.where, and that "
                "they have the columns that are read"
            )
        if isinstance(row, UserError):
            yield index + 1, row
            continue
        try:
            fields = fields or Fields.of(source, preset, row, key, pairs)
            if fields.accepts(row):
                # Columns of Parquet and Arrow give every object the keys of all others, with null as value.
                filled = source.source is None and not _LINE.search(where)
                read = {key: without_nulls(value) for key, value in row.items()} if filled else row
                prompt, answer, completion = fields.read(read, where)
                chinese = fields.english and _CHINESE.search(str(prompt))
                kept, variables = row if rows else None, template_variables_of(read)
                rank = 0.0 if order is None or chinese else _rank(row, *order, where)
                problem = Problem(
                    offset + index, prompt, answer, number, where, kept, rank, variables, completion
                )
                used = index + 1
                yield index + 1, None if chinese else problem
            else:
                yield index + 1, None
        except UserError as e:
            yield index + 1, e


class Fields(NamedTuple):
    """Names of the columns to read, and filters on rows."""

    prompt: str
    answer: str
    after: str | None
    boxed: bool
    where: dict[str, tuple[Any, ...]]
    optional: dict[str, Any]
    """The preset's filters; rows without the column pass."""
    english: bool
    listed: bool
    """An answer may be the only item of a list."""
    key: str
    """Key of the source in the settings, for messages."""
    recorded: bool = False
    """The rows are conversations to train on: answers are responses, word for word."""

    @classmethod
    def of(
        cls,
        source: SourceSettings,
        preset: Preset | None,
        row: dict[str, Any],
        key: str,
        pairs: tuple[tuple[str, str], ...] = _PROBLEMS,
    ) -> Fields:
        """The columns in the settings; where not set, the first pair that this row has.

        pairs: of columns, unless a preset has others.
        """
        recorded = pairs is _CONVERSATIONS
        pairs = preset.fields if preset else pairs
        present = (p for p in pairs if all(_find(row, name) is not None for name in p if name))
        prompt, answer = next(present, pairs[0])
        if recorded and source.prompt_key and isinstance(_find(row, source.prompt_key), list):
            answer = ""
        prompt, answer = source.prompt_key or prompt, source.answer_key or answer
        after = source.answer_after
        if after is None and preset is not None and not source.answer_key and not source.answer_boxed:
            after = preset.answer_after
        boxed = source.answer_boxed or (preset is not None and after is None and answer in preset.boxed)
        where = {key: v if isinstance(v, tuple) else (v,) for key, v in source.where.items()}
        optional = dict(preset.where) if preset else {}
        english, listed = (preset.english, preset.listed) if preset else (False, False)
        return cls(prompt, answer, after, boxed, where, optional, english, listed, key, recorded)

    def accepts(self, row: dict[str, Any]) -> bool:
        """Whether the row passes the filters."""
        return all(_find(row, key) in values for key, values in self.where.items()) and all(
            row.get(key, value) == value for key, value in self.optional.items()
        )

    def read(
        self, row: dict[str, Any], where: str
    ) -> tuple[str | tuple[Message, ...], str, tuple[Message, ...]]:
        """Problem, answer, and the messages of a response that is a chat. Raises UserError if one is missing,
        empty or of the wrong type.
        """
        setting = f"{self.key}.prompt_key" + " and answer_key" * self.recorded
        prompt = _prompt(_field(row, self.prompt, setting, where), self.prompt, where)
        _check_text(prompt, "", where)
        if self.recorded and (
            other := next(
                (c for c in _NOT_READ if row.get(c) not in (None, "", [], {}) and c not in self[:2]), ""
            )
        ):
            raise UserError(
                f"{where}: the column {other!r} is not read; put what it says into the messages (a system "
                "message, weight 0 or 1) or into tools, or remove it"
            )
        if self.recorded and not self.answer:
            return prompt, "", ()
        value = _field(row, self.answer, f"{self.key}.answer_key", where)
        if (self.listed or self.recorded) and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if self.recorded and isinstance(value, dict | list):  # a prompt and a completion, both as messages
            messages = _chat(value if isinstance(value, list) else [value], self.answer, where)
            if (
                len(messages) > 1
                or messages[0].fields
                or messages[0].role != "assistant"
                or not messages[0].trained
            ):
                return prompt, "", messages
            value = messages[0].content
        answer = _answer(value, self.answer, where)
        _check_text("", answer, where)
        if self.after is not None:
            _before, marker, answer = answer.rpartition(self.after)
            if not marker:
                raise UserError(
                    f"{where}: {self.answer!r} does not contain {self.after!r} ({self.key}.answer_after); "
                    f"fix the line, or set {self.key}.answer_after to the marker of this file"
                )
        if self.boxed:
            box = last_box(answer)
            if box is None:
                raise UserError(
                    f"{where}: {self.answer!r} contains no complete \\boxed{{}}; fix or remove the row"
                )
            answer = box[1]
        if not self.recorded or not answer.strip():
            answer = answer.strip()
        empty = isinstance(prompt, str) and not prompt.strip()
        for key, nothing in ((self.prompt, empty), (self.answer, not answer)):
            if nothing:
                raise UserError(f"{where}: {key!r} is empty; fill it in or remove the line")
        return prompt, answer, ()


def _check_text(prompt: str | tuple[Message, ...], answer: str, where: str) -> None:
    try:
        check_plain([prompt, answer])
    except ValueError as e:
        raise UserError(f"{where}: {e}; remove it") from None


def _prompt(value: Any, key: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, list):
        return _chat(value, key, where)
    if isinstance(value, str):
        return value
    raise UserError(f"{where}: {key!r} is a {type_name(value)}, not text; put it in quotes")


def _chat(value: list[Any], key: str, where: str) -> tuple[Message, ...]:
    try:
        return read_chat(value)
    except ValueError as e:
        raise UserError(f"{where}: {key!r} {e}") from None


def _answer(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {key!r} is a {type_name(value)}; it must be text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {key!r} is {value}, which is no answer; fill it in or remove the line")
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python converts
        raise UserError(f"{where}: {key!r} is a number too long to print; put it in quotes") from None


def _rank(row: dict[str, Any], column: str, setting: str, where: str) -> float:
    value = _field(row, column, setting, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        text = str(value) if isinstance(value, float) else f"a {type_name(value)}"
        raise UserError(
            f"{where}: {column!r} is {text}, and the prompts are to be ordered by it ({setting}); give every "
            "row a number there"
        )
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{where}: {column!r} is a number too large to order by ({setting})") from None


def _find(row: dict[str, Any], key: str) -> Any:
    """The value of a column, or for ``a.b`` of field b in column a; None if there is none."""
    if key in row:
        return row[key]
    outer, dot, inner = key.partition(".")
    return _find(row[outer], inner) if dot and isinstance(row.get(outer), dict) else None


def _field(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    value = _find(row, key)
    if value is None and key not in row:
        keys = ", ".join(repr(k) for k in row) or "none"
        raise UserError(
            f"{where}: the key {key!r} is missing (keys of this line: {keys}); add it or set {setting}"
        )
    return value

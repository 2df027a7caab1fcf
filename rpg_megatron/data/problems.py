"""Read and validate problems with reference answers. Needs neither torch nor a tokenizer."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from rpg_megatron.config.data import DataSettings, SourceSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.data.boxed import last_box
from rpg_megatron.data.presets import Preset, find_preset
from rpg_megatron.data.rows import read_rows, source_name, type_name

logger = logging.getLogger(__name__)

_CHINESE = re.compile("[\u3400-\u9fff]")


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


class Problem(NamedTuple):
    """One row of a data set, not yet tokenized."""

    id: int
    """Index of its row; in a mixture, plus the number of rows of all earlier sources."""
    prompt: str | tuple[Message, ...]
    """The problem as in the data, before the template is applied: text or a chat."""
    answer: str
    """The reference answer."""
    source: int
    """Index of its source in the mixture."""
    where: str
    """File and row, for messages."""
    row: dict[str, Any] | None = None
    """All columns, if ``rows`` was set."""

    @property
    def text(self) -> str:
        """The problem as one text."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m.content for m in self.prompt)


def read_problems(settings: DataSettings, key: str = "data", *, rows: bool = False) -> list[Problem]:
    """Read and validate all sources; a warning says how many rows were left out.

    key: of ``settings`` in the configuration, for messages. rows: keep all columns.
    Raises UserError, with file, row (from 1) and fix, for a malformed row unless ``data.malformed`` is
    ``skip``, and for a source without any problem.
    """
    problems, left_out, first_bad = read_problems_with_counts(settings, key, rows=rows)
    if left_out:
        counts = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        example = f"; first malformed row: {first_bad}" if first_bad else ""
        logger.warning("prompts left out: %s (%d are used)%s", counts, len(problems), example)
    return problems


def read_problems_with_counts(
    settings: DataSettings, key: str = "data", *, rows: bool = False
) -> tuple[list[Problem], dict[str, int], UserError | None]:
    """The problems, the number of rows left out by reason, and the error of the first malformed row.

    Parameters and errors are those of ``read_problems``.
    """
    if "{prompt}" not in settings.template:
        raise UserError(
            f"{key}.template: {settings.template!r} has no placeholder for the problem; add {{prompt}}"
        )
    problems: list[Problem] = []
    left_out: Counter[str] = Counter()
    first_bad: UserError | None = None
    seen: set[str] = set()
    offset = 0
    for number, source in enumerate(settings.sources):
        at = f"{key}.mixture[{number}]" if settings.mixture else key
        preset = find_preset(source.preset, at) if source.preset is not None else None
        before, total = len(problems), 0
        for count, found in _read_source(source, preset, number, offset, at, rows):
            total = count
            if isinstance(found, UserError):
                if settings.malformed == "stop":
                    raise found
                first_bad = first_bad or found
                left_out["malformed"] += 1
            elif found is None:
                left_out["filtered"] += 1
            elif settings.deduplicate or (preset is not None and preset.repeated):
                text = " ".join(found.text.split())
                if text in seen:
                    left_out["duplicate"] += 1
                else:
                    seen.add(text)
                    problems.append(found)
            else:
                problems.append(found)
        if len(problems) == before:
            raise _no_problems(source, preset, total, first_bad, key, at)
        offset += total
    return problems, dict(left_out), first_bad


def first_problems(settings: DataSettings, key: str) -> Iterator[Problem]:
    """The first problem of each source, with its row; parameters as in ``read_problems``.

    Rows that cannot be read are left out. Raises UserError if a source cannot be read at all.
    """
    for number, source in enumerate(settings.sources):
        at = f"{key}.mixture[{number}]" if settings.mixture else key
        preset = find_preset(source.preset, at) if source.preset is not None else None
        for _, found in _read_source(source, preset, number, 0, at, rows=True):
            if isinstance(found, Problem):
                yield found
                break


def _no_problems(
    source: SourceSettings, preset: Preset | None, rows: int, bad: UserError | None, key: str, at: str
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
    source: SourceSettings, preset: Preset | None, number: int, offset: int, key: str, rows: bool
) -> Iterator[tuple[int, Problem | UserError | None]]:
    """Yield, for each row, the number of rows so far and: its problem, its error, or None if filtered out."""
    fields: Fields | None = None
    for index, where, row in read_rows(source, preset, key):
        if isinstance(row, UserError):
            yield index + 1, row
            continue
        try:
            fields = fields or Fields.of(source, preset, row, key)
            if fields.accepts(row):
                prompt, answer = fields.read(row, where)
                chinese = fields.english and _CHINESE.search(str(prompt))
                kept = row if rows else None
                problem = Problem(offset + index, prompt, answer, number, where, kept)
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

    @classmethod
    def of(cls, source: SourceSettings, preset: Preset | None, row: dict[str, Any], key: str) -> Fields:
        """The columns in the settings; where not set, the preset's first pair that this row has."""
        pairs = preset.fields if preset else (("prompt", "answer"),)
        present = (p for p in pairs if _find(row, p[0]) is not None and _find(row, p[1]) is not None)
        prompt, answer = next(present, pairs[0])
        prompt, answer = source.prompt_key or prompt, source.answer_key or answer
        after = source.answer_after
        if after is None and preset is not None and not source.answer_key and not source.answer_boxed:
            after = preset.answer_after
        boxed = source.answer_boxed or (preset is not None and after is None and answer in preset.boxed)
        where = {key: v if isinstance(v, tuple) else (v,) for key, v in source.where.items()}
        optional = dict(preset.where) if preset else {}
        english, listed = (preset.english, preset.listed) if preset else (False, False)
        return cls(prompt, answer, after, boxed, where, optional, english, listed, key)

    def accepts(self, row: dict[str, Any]) -> bool:
        """Whether the row passes the filters."""
        return all(_find(row, key) in values for key, values in self.where.items()) and all(
            row.get(key, value) == value for key, value in self.optional.items()
        )

    def read(self, row: dict[str, Any], where: str) -> tuple[str | tuple[Message, ...], str]:
        """Problem and answer of a row. Raises UserError if one is missing, empty or of the wrong type."""
        prompt = _prompt(_field(row, self.prompt, f"{self.key}.prompt_key", where), self.prompt, where)
        value = _field(row, self.answer, f"{self.key}.answer_key", where)
        if self.listed and isinstance(value, list) and len(value) == 1:
            value = value[0]
        answer = _answer(value, self.answer, where)
        try:
            (str(prompt) if isinstance(prompt, str) else "".join(m.content for m in prompt)).encode("utf-8")
            answer.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"{where}: contains a lone surrogate (\\ud800 to \\udfff), which is no character; remove it"
            ) from None
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
        answer = answer.strip()
        empty = isinstance(prompt, str) and not prompt.strip()
        for key, nothing in ((self.prompt, empty), (self.answer, not answer)):
            if nothing:
                raise UserError(f"{where}: {key!r} is empty; fill it in or remove the line")
        return prompt, answer


def _prompt(value: Any, key: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        chat = []
        for turn in value:
            role = turn.get("role") if isinstance(turn, dict) else None
            content = turn.get("content") if isinstance(turn, dict) else None
            if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
                break
            chat.append(Message(role, content))
        if chat and len(chat) == len(value):
            return tuple(chat)
        raise UserError(
            f"{where}: {key!r} is a list, but not of chat messages; give each item a role and a content, "
            "both text"
        )
    raise UserError(f"{where}: {key!r} is a {type_name(value)}, not text; put it in quotes")


def _answer(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {key!r} is a {type_name(value)}; it must be text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {key!r} is {value}, which is no answer; fill it in or remove the line")
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python converts
        raise UserError(f"{where}: {key!r} is a number too long to print; put it in quotes") from None


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

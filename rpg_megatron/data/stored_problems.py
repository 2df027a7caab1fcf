"""Problems, and where they are kept: a few in memory, many in a file, which later runs use too."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rpg_megatron.config.data import DataSettings, SourceSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.cache_files import (
    CachePlace,
    cache_folders,
    content_digest,
    digest_of,
    file_marks,
    find_cached,
    new_cached,
)
from rpg_megatron.data.chat_messages import Message
from rpg_megatron.data.row_store import RowStore, StoredRow, keep_rows, write_rows

logger = logging.getLogger(__name__)

IN_MEMORY = 10_000
"""Data sets of at most this many problems are kept in memory, and nothing is written."""
_TO_JSON = json.JSONEncoder(ensure_ascii=False, default=str).encode
_FORM = 3
"""Increment when problems are read differently, so that files of earlier versions are not used."""


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
    rank: float = 0.0
    """The value of the column ``data.order_by``."""
    variables: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    """What the row gives its chat template besides the messages (``template_variables_of``)."""
    completion: tuple[Message, ...] = ()
    """Fine-tuning: the messages to train on, if they are apart from the prompt."""

    @property
    def text(self) -> str:
        """The problem as one text."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m.text for m in self.prompt)

    @property
    def identity(self) -> str:
        """The same for two rows only if they are the same problem: spaces do not count."""
        messages = () if isinstance(self.prompt, str) else self.prompt
        more = [m.fields for m in messages if m.fields], self.variables, [m.plain for m in self.completion]
        return " ".join(self.text.split()) + (json.dumps(more, default=str) if any(more) else "")


_VARYING, _KINDS = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\d+"), 20
"""What differs between the messages of one kind; kinds that are counted apart."""


class LeftOut:
    """Rows that were left out."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By reason."""
        self.malformed: dict[str, tuple[int, str]] = {}
        """Malformed rows: kind -> their number, and the message of the first."""

    def add(self, error: UserError) -> None:
        """Count a malformed row."""
        self.counts["malformed"] += 1
        kind = _VARYING.sub("", str(error))
        if kind not in self.malformed and len(self.malformed) >= _KINDS:
            kind = ""
        count, first = self.malformed.get(kind, (0, str(error)))
        self.malformed[kind] = count + 1, first

    @property
    def first(self) -> str:
        """The first malformed row of each kind, for a message; empty if there is none."""
        kinds = sorted(self.malformed.values(), reverse=True)
        return "; ".join(f"{count:,} rows such as {text}" if count > 1 else text for count, text in kinds)


Found = tuple[Sequence[Problem], LeftOut]
"""The problems, and the rows that were left out."""


def keep_problems(
    settings: DataSettings, key: str, rows: bool, read: Callable[[LeftOut], Iterator[Problem]]
) -> Found:
    """The problems that ``read`` yields, or that an earlier call has kept: a list or a ``RowStore``.

    settings, key, rows: see ``read_problems``. read: is called again if a file cannot be written.
    """
    paths = [source.path for source in settings.sources if source.path is not None]
    whole = len(paths) == len(settings.sources) and not _is_short(settings)
    folders = cache_folders(paths[0]) if whole else []
    name, digest = _cache_name(settings, paths, rows), cache(lambda: content_digest(paths))
    if cached := find_cached(folders, name, digest, file_marks(paths)):
        with suppress(ValueError, KeyError, TypeError):
            return _from_store(*cached)
    for folder in [*folders, None]:
        left_out = LeftOut()
        each = read(left_out)
        marks = file_marks(paths) if whole else None
        problems = list(islice(each, IN_MEMORY + 1))
        if len(problems) <= IN_MEMORY:
            if settings.order_by is not None:
                problems.sort(key=lambda problem: problem.rank)
            return problems, left_out
        all_rows = (_encode(problem) for problem in chain(problems, each))
        del problems
        if folder is None:
            return keep_rows(all_rows, _decode, f"{key}: the problems"), left_out
        try:
            with new_cached(folder, name) as writer:
                description = write_rows(writer, all_rows) | {"content": digest(), "marks": marks}
                writer.finish(description | {"left_out": left_out.counts, "malformed": left_out.malformed})
                if marks is None or file_marks(paths) != marks:
                    raise OSError("the data have changed while they were read")
        except OSError as e:
            logger.info("%s: not used (%s)", folder, e)
            continue
        if cached := find_cached([folder], name, digest, marks):
            return _from_store(*cached)
    raise AssertionError("not reached")


def _is_short(settings: DataSettings) -> bool:
    """Whether the data are read only in part, and are not large."""
    limits = [source.limit for source in settings.sources]
    return sum(limit or IN_MEMORY + 1 for limit in limits) <= IN_MEMORY


def _cache_name(settings: DataSettings, paths: Sequence[Path], rows: bool) -> str:
    """Name of the file of problems; it depends on all settings by which they are read."""
    sources = [source.model_dump(include=set(SourceSettings.model_fields)) for source in settings.sources]
    how = [settings.deduplicate, settings.malformed, settings.order_by, rows]
    if isinstance(settings, ConversationSettings):
        how.append("conversations")  # other columns, and responses word for word
    return f"{digest_of(_FORM, sources, [str(path.absolute()) for path in paths], how)}.problems"


def _from_store(file: BinaryIO, description: dict[str, Any], place: CachePlace) -> Found:
    left_out = LeftOut()
    left_out.counts.update(description["left_out"])
    left_out.malformed = {k: (int(n), str(first)) for k, (n, first) in description["malformed"].items()}
    return RowStore(file, description, _decode, place), left_out


def _encode(problem: Problem) -> StoredRow:
    value = [*problem[: Problem._fields.index("rank")], problem.variables, problem.completion]
    data = _TO_JSON(value).encode("utf-8", "surrogatepass")
    return StoredRow(data, problem.source, _length(problem.prompt), problem.rank)


def _length(prompt: str | tuple[Message, ...]) -> int:
    """Bytes of a text in UTF-8, as a negative number if it is not ASCII; 0 for a chat."""
    if not isinstance(prompt, str):
        return 0
    return len(prompt) if prompt.isascii() else -len(prompt.encode())


def _decode(data: bytes) -> Problem:
    value = json.loads(data.decode("utf-8", "surrogatepass"))
    number, prompt, answer, source, where, row, variables, completion = value
    if not isinstance(prompt, str):
        prompt = _messages(prompt)
    return Problem(number, prompt, answer, source, where, row, 0.0, variables, _messages(completion))


def _messages(values: Any) -> tuple[Message, ...]:
    return tuple(Message(*message) for message in values)

"""Rows in a file instead of in memory: 40 bytes of memory a row."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple, overload

from rpg_megatron.config.errors import UserError
from rpg_megatron.data.cache_files import CachePlace, CacheWriter

_COLUMNS = ("starts", "sizes", "ids", "sources", "lengths")
_TO_JSON = json.JSONEncoder(ensure_ascii=False, default=str).encode


class StoredRow(NamedTuple):
    """A row to be stored."""

    value: Any
    """Of JSON's types; others become text."""
    id: int
    source: int
    length: int
    """For its reader: a measure of the value."""
    rank: float
    """Rows are sorted by it; equal ones stay in their order."""


class RowStore[T](Sequence[T]):
    """The rows of a file that ``write_rows`` wrote. They are read when they are asked for."""

    def __init__(
        self,
        file: BinaryIO,
        description: dict[str, Any],
        decode: Callable[[Any], T],
        place: CachePlace | None,
    ):
        """decode: makes a row of its value. place: of the file, if it is kept for later runs.

        Raises ValueError, KeyError or TypeError if the description is of another file.
        """
        self._file, self._decode, self.place = file, decode, place
        self.description = description
        count, position = description["rows"], description["columns"]
        columns = {}
        for name in _COLUMNS:
            columns[name] = array("q", os.pread(file.fileno(), 8 * count, position))
            position += 8 * count
            if len(columns[name]) != count:
                raise ValueError("a column is not whole")
        self._starts, self._sizes = columns["starts"], columns["sizes"]
        self.ids, self.sources, self.lengths = columns["ids"], columns["sources"], columns["lengths"]
        """Of each row, int64."""

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Raises UserError if the file has been cut meanwhile."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        size = self._sizes[index]
        data = os.pread(self._file.fileno(), size, self._starts[index])
        if len(data) != size:
            raise UserError(
                f"{self._file.name}: has become shorter during the run; remove it, then rerun the command"
            )
        return self._decode(json.loads(data.decode("utf-8", "surrogatepass")))


def write_rows(writer: CacheWriter, rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Write rows; returns what ``RowStore`` needs of the file's description. Raises OSError."""
    starts, sizes, ids, sources, lengths = (array("q") for _ in _COLUMNS)
    ranks = array("d")
    for row in rows:
        text = _TO_JSON(row.value).encode("utf-8", "surrogatepass")
        starts.append(writer.position)
        sizes.append(len(text))
        ids.append(row.id)
        sources.append(row.source)
        lengths.append(row.length)
        ranks.append(row.rank)
        writer.write(text)
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    position = writer.position
    for column in (starts, sizes, ids, sources, lengths):
        writer.write(array("q", map(column.__getitem__, order)).tobytes())
    return {"rows": len(order), "columns": position}

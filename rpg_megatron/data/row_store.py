"""Rows in a file instead of in memory: 32 bytes of memory a row."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple, overload

from rpg_megatron.config.errors import UserError
from rpg_megatron.data.cache_files import CachePlace, CacheWriter

_COLUMNS = 4


class StoredRow(NamedTuple):
    """A row to be stored."""

    data: bytes
    source: int
    length: int = 0
    """For its reader: a measure of the row."""
    rank: float = 0.0
    """Rows are sorted by it; equal ones stay in their order."""


class RowStore[T](Sequence[T]):
    """The rows of a file that ``write_rows`` wrote. They are read when they are asked for."""

    def __init__(
        self,
        file: BinaryIO,
        description: dict[str, Any],
        decode: Callable[[bytes], T],
        place: CachePlace | None = None,
    ):
        """decode: makes a row of its data. place: of the file, if it is kept for later runs.

        Raises ValueError, KeyError or TypeError if the description is of another file.
        """
        self._file, self._decode, self.place = file, decode, place
        self.description = description
        size, begin = 8 * description["rows"], description["columns"]
        columns = [array("q", os.pread(file.fileno(), size, begin + i * size)) for i in range(_COLUMNS)]
        if any(len(column) != description["rows"] for column in columns):
            raise ValueError("a column is not whole")
        self._starts, self._sizes, self.sources, self.lengths = columns
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
        data = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        if len(data) != self._sizes[index]:
            raise UserError(
                f"{self._file.name}: has become shorter during the run; remove it, then rerun the command"
            )
        return self._decode(data)


def write_rows(writer: CacheWriter, rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Write rows; returns what ``RowStore`` needs of the file's description. Raises OSError."""
    columns, ranks = [array("q") for _ in range(_COLUMNS)], array("d")
    for row in rows:
        values = writer.position, len(row.data), row.source, row.length
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        ranks.append(row.rank)
        writer.write(row.data)
    position = writer.position
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    for column in columns:
        writer.write(array("q", map(column.__getitem__, order)).tobytes())
    return {"rows": len(order), "columns": position}


def keep_rows[T](rows: Iterable[StoredRow], decode: Callable[[bytes], T], what: str) -> RowStore[T]:
    """A store of rows in a file without a name. what: the rows, for the UserError if the disk is full."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  the store keeps it
        description = write_rows(CacheWriter(file), rows)
        file.flush()
    except OSError as e:
        raise UserError(
            f"{what} cannot be kept in {tempfile.gettempdir()} ({e.strerror or e}); free disk space, or set "
            "TMPDIR to another folder"
        ) from None
    return RowStore(file, description, decode)

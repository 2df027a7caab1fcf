"""Reader of Arrow and Parquet files for ``system/foreign_input.py``: batches of rows as plain values.

It runs in a process that can reach nothing: Arrow's C++ code trusts the offsets in a file, so that a changed
bit can end its process. Batches are checked in full before their values are used.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from importlib.abc import MetaPathFinder
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rpg_megatron.config.errors import first_line

_SHORT_FLOATS = {pa.float16(): np.float16, pa.float32(): np.float32}
BATCH = 16
"""Rows decoded at a time: rows may be long, and a batch is in memory more than once."""
TOO_LARGE = "too large"

Batch = tuple[int, int, list[dict[str, msgspec.Raw] | Annotated[str, msgspec.Meta(max_length=1000)]]]
"""Index of the first row, number of damaged rows, and rows (column -> value, encoded); text: what is wrong
with them."""


class _WithoutPandas:
    """Arrow uses it for times in nanoseconds only, and those become microseconds (``_simple_times``)."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def prepare() -> None:
    """Load what Arrow loads late for its conversions to Python. Not pandas: it takes longer than all else."""
    sys.meta_path.insert(0, cast(MetaPathFinder, _WithoutPandas))
    values = {"a": [b"x"], "b": [{"c": ["x"]}], "d": [1.0]}
    table = pa.table(values | {"t": pa.array([1], pa.timestamp("ns", "UTC"))})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    for file, read in ((buffer, lambda f: _parquet(f, 1 << 20)), (stream, _arrow)):
        file.seek(0)
        for batch in read(file):
            list(table_rows(batch))


def read_batches(
    files: Sequence[BinaryIO], argument: tuple[str, int]
) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield batches of rows of files of one kind, as one data set.

    argument: the kind, "parquet" or "arrow", and the largest size in memory of a group of rows, bytes.
    Raises ValueError(TOO_LARGE) for larger ones.
    """
    kind, limit = argument
    first = 0
    for file in files:
        for batch in _parquet(file, limit) if kind == "parquet" else _arrow(file):
            if isinstance(batch, tuple):  # damaged rows
                count, why = batch
                yield first, count, [why]
                first += count
                continue
            if batch.nbytes > limit:
                raise ValueError(TOO_LARGE)
            if batch.num_rows:
                yield first, 0, list(table_rows(batch))
            first += batch.num_rows


def _parquet(file: BinaryIO, limit: int) -> Iterator[pa.RecordBatch | tuple[int, str]]:
    """Batches; or the number of rows of a damaged group that are not read, and why."""
    opened = pq.ParquetFile(file, pre_buffer=False)
    for number in range(opened.metadata.num_row_groups):
        group = opened.metadata.row_group(number)
        if group.total_byte_size > limit:
            raise ValueError(TOO_LARGE)
        done = 0
        try:
            for batch in opened.iter_batches(BATCH, row_groups=[number], use_threads=False):
                _check(batch)
                yield batch
                done += batch.num_rows
        except (pa.ArrowException, OSError) as e:
            yield group.num_rows - done, first_line(e)


def _arrow(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    # A file in Arrow's file format is a stream too, behind its mark. Its own reader would start threads.
    file.seek(8 if file.read(6) == b"ARROW1" else 0)
    reader = pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(use_threads=False))
    for batch in reader:
        _check(batch)
        for start in range(0, batch.num_rows, BATCH):
            yield batch.slice(start, BATCH)


def _check(batch: pa.RecordBatch) -> None:
    """Raise ArrowException if offsets or sizes are wrong. Text is checked when it is decoded, row by row."""
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    for column in batch.columns:
        (column.view(as_bytes[column.type]) if column.type in as_bytes else column).validate(full=True)


def table_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch as plain values; text: what is wrong with a row."""
    columns = {
        name: _simple_times(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    for index in range(batch.num_rows):
        row: dict[str, Any] = {}
        broken = None
        for column, values in columns.items():
            try:
                row[column] = _plain(values[index].as_py(), values.type)
            except UnicodeDecodeError as e:
                broken = f"{column!r} is not UTF-8 (byte {e.start + 1}); save the file as UTF-8"
            except (ValueError, OverflowError, OSError, ImportError) as e:  # such as a date beyond Python's
                broken = f"{column!r} cannot be read ({first_line(e)}); store it as text"
        yield broken[:1000] if broken else row


def _simple_times(column: pa.Array) -> pa.Array:
    """Times in UTC and microseconds: other zones, and pandas for nanoseconds, would be loaded from files."""
    simple = _simple_type(column.type)
    return column if simple == column.type else column.cast(simple, safe=False)


def _simple_type(kind: pa.DataType) -> pa.DataType:
    unit = "us" if getattr(kind, "unit", None) == "ns" else getattr(kind, "unit", None)
    if pa.types.is_timestamp(kind):
        return pa.timestamp(unit, "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration(unit)
    if pa.types.is_time64(kind):
        return pa.time64(unit)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_simple_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_simple_type(field.type)) for field in kind])
    return kind


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Values that JSON has, and bytes; others, such as dates, as text. kind: the type in the file.

    A float of 16 or 32 bits becomes the shortest decimal that is it in its own type: 0.1, and not
    0.10000000149011612, its exact value.
    """
    while isinstance(kind, pa.BaseExtensionType | pa.DictionaryType | pa.RunEndEncodedType):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    if isinstance(value, dict):
        return {str(key): _plain(each, kind.field(key).type) for key, each in value.items()}
    if isinstance(value, list | tuple) and pa.types.is_map(kind):
        return [[_plain(key, kind.key_type), _plain(each, kind.item_type)] for key, each in value]
    if isinstance(value, list | tuple):
        inner = getattr(kind, "value_type", kind)
        return [_plain(each, inner) for each in value]
    if isinstance(value, float) and kind in _SHORT_FLOATS:
        return float(str(_SHORT_FLOATS[kind](value)))
    if isinstance(value, Decimal):
        return format(value, "f")  # without an exponent
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else str(value)

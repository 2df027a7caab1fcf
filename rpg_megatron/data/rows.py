"""Read rows of JSON Lines, Parquet and Arrow files and of Hugging Face data sets.

Files are read without network access and are not copied to a cache. A row that cannot be read is yielded as a
UserError, so that the caller can raise or count it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rpg_megatron.config.data import SourceSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_regular, parse_json
from rpg_megatron.data.custom_source import custom_rows
from rpg_megatron.data.presets import Preset

Row = tuple[int, str, dict[str, Any] | UserError]
"""Index from 0, position for messages (``file:line`` or ``file: row 3``), and the row or its error."""

_BATCH = 16
"""Rows decoded at a time: rows may be long, and a batch is in memory more than once."""
_MAX_EXPANSION, _MIN_TEXT_LIMIT = 100, 256 * 1024**2
"""A compressed file may hold this many times its bytes of text, or ``_MIN_TEXT_LIMIT`` if that is more: a
file of a few KB can stand for GBs, while real text compresses by a factor of 3 to 10."""


def read_rows(source: SourceSettings, preset: Preset | None, key: str = "data") -> Iterator[Row]:
    """The rows of a source, at most ``limit``. key: of the source in the settings, for messages.

    Raises UserError if the file or data set does not exist, cannot be read at all, or is far larger in memory
    than on disk.
    """
    if source.source is not None:
        rows = custom_rows(source.source, source.limit, f"{key}.source")
    elif source.path is None:
        rows = _hub_rows(source, preset, key)
    elif (source.path / "dataset_info.json").is_file():
        rows = _bounded(source.path, _saved_rows(source.path))
    elif source.path.suffix == ".parquet":
        rows = _bounded(source.path, _parquet_rows(source.path, key))
    elif source.path.suffix == ".arrow":
        rows = _bounded(source.path, _arrow_rows(source.path, key))
    else:
        rows = _json_rows(source.path, key)
    for row in rows:
        if source.limit is not None and row[0] >= source.limit:
            return
        yield row


def _bounded(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows; raise UserError when they hold more text than allowed for a file of this size."""
    total, limit = 0, _text_limit(path)
    for row in rows:
        total += _text_size(row[2])
        if total > limit:
            raise _too_large(path, limit)
        yield row


def _text_limit(path: Path) -> int:
    try:
        size = sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size
    except OSError:
        size = 0  # the reader reports the problem
    return max(_MIN_TEXT_LIMIT, _MAX_EXPANSION * size)


def _text_size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


def _too_large(path: Path, limit: int) -> UserError:
    return UserError(
        f"{path}: holds more than {limit / 1e6:,.0f} MB of text, at least {_MAX_EXPANSION} times its size; "
        "write it as JSON lines, which have no limit"
    )


def source_name(source: SourceSettings, preset: Preset | None) -> str:
    """Name of a source for messages."""
    if source.path is not None:
        return str(source.path)
    if source.source is not None:
        return source.source.type
    return source.hub or (preset.hub if preset else "")


# -- JSON lines ----------------------------------------------------------------------------------------------


def _json_rows(path: Path, key: str) -> Iterator[Row]:
    try:
        with open_regular(path) as file:
            for index, raw in enumerate(file):
                if raw.strip():
                    where = f"{path}:{index + 1}"
                    yield index, where, _parse_json(raw, where, index == 0)
    except FileNotFoundError:
        raise UserError(f"{key}.path: {path} does not exist; give a JSON lines file") from None
    except IsADirectoryError:
        raise UserError(f"{key}.path: {path} is a directory; give a JSON lines file") from None
    except OSError as e:
        raise UserError(f"{key}.path: {path} cannot be read ({e.strerror or e})") from None


def _parse_json(raw: bytes, where: str, first: bool) -> dict[str, Any] | UserError:
    try:
        row = parse_json(raw.decode("utf-8-sig" if first else "utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as e:
        return UserError(f"{where}: not UTF-8 (byte {e.start + 1} of the line); save the file as UTF-8")
    except ValueError as e:
        return UserError(f"{where}: not valid JSON ({e}); give one JSON object a line")
    if not isinstance(row, dict):
        return UserError(f"{where}: holds a {type_name(row)}, not an object; give one JSON object a line")
    return row


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def type_name(value: Any) -> str:
    """Name of a value's type for messages."""
    names = {dict: "object", list: "list", str: "text", bool: "true/false value", type(None): "null"}
    fallback = "number" if isinstance(value, int | float) else type(value).__name__
    return names.get(type(value), fallback)


# -- Arrow and Parquet ---------------------------------------------------------------------------------------


def _parquet_rows(path: Path, key: str) -> Iterator[Row]:
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    _check_file(path, key)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (ArrowException, OSError) as e:
        raise UserError(
            f"{path}: not a complete Parquet file, no row can be read ({_first_line(e)}); "
            "copy or download it again"
        ) from None
    with file:
        index, limit = 0, _text_limit(path)
        for group in range(file.metadata.num_row_groups):
            last = index + file.metadata.row_group(group).num_rows
            if file.metadata.row_group(group).total_byte_size > limit:
                raise _too_large(path, limit)
            try:
                for batch in file.iter_batches(_BATCH, row_groups=[group]):
                    yield from _table_rows(str(path), batch, index)
                    index += batch.num_rows
            except (ArrowException, OSError) as e:
                where = f"{path}: rows {index + 1} to {last}"
                yield (
                    index,
                    where,
                    UserError(f"{where}: damaged ({_first_line(e)}); copy or download the file again"),
                )
            index = last


def _arrow_rows(path: Path, key: str) -> Iterator[Row]:
    import datasets
    from pyarrow.lib import ArrowException

    _check_file(path, key)
    try:
        found = datasets.Dataset.from_file(str(path))
    except (ArrowException, OSError, ValueError) as e:
        raise UserError(
            f"{path}: not a complete Arrow file, no row can be read ({_first_line(e)}); "
            "copy or download it again"
        ) from None
    yield from _dataset_rows(str(path), found)


def _saved_rows(path: Path) -> Iterator[Row]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as e:  # a damaged folder may raise anything
        raise UserError(f"{path}: cannot be read ({_first_line(e)}); save the data set again") from None
    yield from _dataset_rows(str(path), found)


def _hub_rows(source: SourceSettings, preset: Preset | None, key: str) -> Iterator[Row]:
    import datasets

    name = source.hub or (preset.hub if preset else "")
    defaults = preset if source.hub is None else None
    subset = source.subset or (defaults.subset if defaults else None)
    split = source.split or (defaults.split if defaults else "train")
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except Exception as e:  # connection, permission and parsing errors of any type
        raise UserError(
            f"{key}.hub: {name}{f', subset {subset}' if subset else ''}, split {split} cannot be loaded "
            f"({type(e).__name__}: {_first_line(e)}); check name and network, or set {key}.path to a "
            "local copy"
        ) from None
    yield from _dataset_rows(name, found)


def _dataset_rows(name: str, found: Any) -> Iterator[Row]:
    for start in range(0, len(found), _BATCH):
        batch = found.select(range(start, min(start + _BATCH, len(found))))
        yield from _table_rows(name, batch.with_format("arrow")[:], start)


def _table_rows(name: str, table: Any, start: int) -> Iterator[Row]:
    """Rows of an Arrow table; a row that is not UTF-8 becomes a UserError."""
    columns = {column: table.column(column) for column in table.column_names}
    for index in range(table.num_rows):
        where = f"{name}: row {start + index + 1}"
        row: dict[str, Any] = {}
        broken = None
        for column, values in columns.items():
            try:
                row[column] = values[index].as_py()
            except UnicodeDecodeError as e:
                broken = UserError(
                    f"{where}: {column!r} is not UTF-8 (byte {e.start + 1}); save the file as UTF-8"
                )
        yield start + index, where, broken or row


def _check_file(path: Path, key: str) -> None:
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
        raise UserError(f"{key}.path: {path} {state}; give a {path.suffix} file")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]

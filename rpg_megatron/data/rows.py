"""Read rows of JSON Lines, Parquet and Arrow files and of Hugging Face data sets.

Files are read without network access and are not copied to a cache. A row that cannot be read is yielded as a
UserError, so that the caller can raise or count it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rpg_megatron.config.data import SourceSettings
from rpg_megatron.config.errors import UserError, first_line
from rpg_megatron.config.files import open_regular, parse_json, read_json
from rpg_megatron.data.custom_source import custom_rows
from rpg_megatron.data.presets import Preset
from rpg_megatron.data.shards import list_shards

Row = tuple[int, str, dict[str, Any] | UserError]
"""Index from 0, position for messages (``file:line`` or ``file: row 3``), and the row or its error."""

_PARQUET, _ARROW = "parquet", "arrow"
_READER = "rpg_megatron.data.arrow_reader:read_batches"
_MEMORY, _MOST_MEMORY = 2 << 30, 64 << 30
_MAX_EXPANSION, _MIN_TEXT_LIMIT = 100, 256 * 1024**2
"""A compressed file may hold this many times its bytes of text, or ``_MIN_TEXT_LIMIT`` if that is more: a
file of a few KB can stand for GBs, while real text compresses by a factor of 3 to 10."""
_ROW, _NUMBER = 64, 8
"""A row counts as this many bytes more, and a number as so many: a file can have any number of them."""
_LONGEST_LINE = 256 * 1024**2
"""Of JSON lines, in bytes."""
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")
"""First bytes of gzip, zstd, xz and zip."""


def read_rows(source: SourceSettings, preset: Preset | None, key: str = "data") -> Iterator[Row]:
    """The rows of a source, at most ``limit``. key: of the source in the settings, for messages.

    Raises UserError if the file or data set does not exist, cannot be read at all, or is far larger in memory
    than on disk.
    """
    if source.source is not None:
        rows = custom_rows(source.source, source.limit, f"{key}.source", streaming=source.streaming)
    elif source.path is None:
        rows = _hub_rows(source, preset, key)
    elif (source.path / "dataset_info.json").is_file():
        rows = _bounded(source.path, _saved_rows(source.path))
    elif source.path.is_dir():
        rows = _folder_rows(source.path, key)
    else:
        rows = _file_rows(source.path, key)
    for row in rows:
        if source.limit is not None and row[0] >= source.limit:
            return
        yield row


def _folder_rows(folder: Path, key: str) -> Iterator[Row]:
    """The rows of all files, numbered through; positions are those in the files."""
    before = 0
    for file in list_shards(folder, key):
        count = 0
        for index, where, row in _file_rows(file, key):
            count = index + 1
            yield before + index, where, row
        before += count


def _file_rows(path: Path, key: str) -> Iterator[Row]:
    kind = {".parquet": _PARQUET, ".arrow": _ARROW}.get(path.suffix)
    try:
        with open_regular(path) as file:
            if kind is None:
                yield from _json_rows(path, file)
            else:
                yield from _bounded(path, _read_batches(path, [file], kind))
    except FileNotFoundError:
        raise UserError(f"{key}.path: {path} does not exist; give a file of rows, or a folder") from None
    except OSError as e:
        raise UserError(f"{key}.path: {path} cannot be read ({e.strerror or e})") from None


def _bounded(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows; raise UserError when they hold more text than allowed for a file of this size."""
    total, limit = 0, _text_limit(path)
    for row in rows:
        total += _ROW + _text_size(row[2])
        if total > limit:
            raise _too_large(path, limit)
        yield row


def _text_limit(path: Path) -> int:
    try:
        size = sum(map(_stored_bytes, path.glob("*.arrow") if path.is_dir() else [path]))
    except OSError:
        size = 0  # the reader reports the problem
    return max(_MIN_TEXT_LIMIT, _MAX_EXPANSION * size)


def _stored_bytes(file: Path) -> int:
    """Bytes of a file on disk, without the holes of a sparse one, which would raise the limits."""
    status = file.stat()
    return min(status.st_size, 512 * status.st_blocks)


def _text_size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return len(value) if isinstance(value, str | bytes) else _NUMBER


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


def _json_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    for index, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b"")):
        where = f"{path}:{index + 1}"
        if len(raw) > _LONGEST_LINE:
            raise UserError(f"{where}: longer than {_LONGEST_LINE:,} bytes; give one JSON object a line")
        if index == 0 and raw.startswith(_COMPRESSED):
            raise UserError(f"{path}: compressed; decompress it (gunzip, unzstd, unxz, unzip)")
        if raw.strip():
            yield index, where, _parse_json(raw, where, index == 0)


def _parse_json(raw: bytes, where: str, first: bool) -> dict[str, Any] | UserError:
    try:
        row = parse_json(raw.decode("utf-8-sig" if first else "utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as e:
        return UserError(f"{where}: not UTF-8 (byte {e.start + 1} of the line); save the file as UTF-8")
    except ValueError as e:
        if first and where.endswith((".csv:1", ".tsv:1")):
            return UserError(f"{where}: a table; convert it to JSON lines (pandas: to_json) or Parquet")
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


def _saved_rows(path: Path) -> Iterator[Row]:
    """Rows of a folder that ``datasets`` saved."""
    try:
        names = [each["filename"] for each in read_json(path / "state.json")["_data_files"]]
        if wrong := [name for name in names if os.path.basename(name) != name or not name]:
            raise ValueError(f"{wrong[0]!r} is not the name of a file in this folder")
        with ExitStack() as stack:
            files = [stack.enter_context(open_regular(path / name)) for name in names]
            yield from _read_batches(path, files, _ARROW)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path}: cannot be read ({first_line(e)}); save the data set again") from None


def _read_batches(path: Path, files: Sequence[BinaryIO], kind: str) -> Iterator[Row]:
    # Imported late: a login node may have neither.
    from rpg_megatron.data.arrow_reader import TOO_LARGE, Batch
    from rpg_megatron.system.foreign_input import ForeignInputError, plain_value, read_foreign

    limit = _text_limit(path)
    try:
        for first, damaged, rows in read_foreign(_READER, files, [kind, limit], Batch, memory=_memory(files)):
            if not rows:
                raise ForeignInputError("a part without rows")
            if damaged:
                where = f"{path}: rows {first + 1} to {first + damaged}"
                why = f"{where}: damaged ({rows[0]}); copy or download the file again"
                yield first, where, UserError(why)
                continue
            for index, row in enumerate(rows, first):
                where = f"{path}: row {index + 1}"
                if isinstance(row, str):
                    yield index, where, UserError(f"{where}: {row}")
                else:
                    yield index, where, {name: plain_value(value) for name, value in row.items()}
    except (ForeignInputError, ValueError, RecursionError) as e:
        if str(e) == TOO_LARGE:
            raise _too_large(path, limit) from None
        name = "Parquet" if kind == _PARQUET else "Arrow"
        raise UserError(
            f"{path}: not a complete {name} file, no further row can be read ({e}); copy or download it again"
        ) from None


def _memory(files: Sequence[BinaryIO]) -> int:
    """Address space for reading: a group of rows, and its values in Arrow's form."""
    largest = max((_stored_bytes(Path(f"/proc/self/fd/{file.fileno()}")) for file in files), default=0)
    return min(_MEMORY + 4 * largest, _MOST_MEMORY)


def _hub_rows(source: SourceSettings, preset: Preset | None, key: str) -> Iterator[Row]:
    import datasets

    name = source.hub or (preset.hub if preset else "")
    defaults = preset if source.hub is None else None
    subset = source.subset or (defaults.subset if defaults else None)
    split = source.split or (defaults.split if defaults else "train")
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except Exception as e:  # connection, permission and parsing errors of any type
        raise UserError(
            f"{key}.hub: {name}{f', subset {subset}' if subset else ''}, split {split} cannot be loaded "
            f"({type(e).__name__}: {first_line(e)}); check name and network, or set {key}.path to a "
            "local copy"
        ) from None
    yield from _dataset_rows(name, dataset)


def _dataset_rows(name: str, dataset: Any) -> Iterator[Row]:
    from rpg_megatron.data.arrow_reader import BATCH, table_rows

    for start in range(0, len(dataset), BATCH):
        table = dataset.select(range(start, min(start + BATCH, len(dataset)))).with_format("arrow")[:]
        for batch in table.combine_chunks().to_batches():
            for index, row in enumerate(table_rows(batch), start):
                where = f"{name}: row {index + 1}"
                yield index, where, UserError(f"{where}: {row}") if isinstance(row, str) else row
            start += batch.num_rows

"""Read and write the rollouts of a run (``rollouts/step_N.parquet``): all trajectories of a step.

A row is a trajectory, a column one of its fields. With several data-parallel replicas, whose leaders write at
the same time, ``step_N.parquet`` is a folder with one file per leader, such as
``part_00000_of_00004.parquet``; Parquet readers treat it as one data set. Files without the columns
``ticket`` and ``branch``, which are then 0, and ``mask``, which is then set, can be read too.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import batched
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rpg_megatron.config import UserError
from rpg_megatron.config.files import atomic_write, open_regular, remove
from rpg_megatron.config.rollout import RolloutFilesSettings
from rpg_megatron.data.trajectory import Trajectory

_ROWS = 64
"""Number of trajectories in memory at once, in addition to the caller's."""
_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_SCHEMA = pa.schema(
    {
        "ticket": pa.int64(),
        "prompt_id": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int64(),
        "branch": pa.int64(),
        "seed": pa.int64(),
        "finish": pa.string(),
        "reward": pa.float64(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "correct": pa.bool_(),
        "answer": pa.string(),
        "extracted": pa.string(),
        "reason": pa.string(),
        "advantage": pa.float64(),
        "text": pa.string(),
        "prompt": _TOKENS,
        "response": _TOKENS,
        "versions": _TOKENS,
        "behaviour": _FLOATS,
        "old": _FLOATS,
        "anchor": _FLOATS,  # null: the same as ``old``
        "mask": pa.list_(pa.bool_()),  # null: all tokens were sampled
    }
)
_PART = re.compile(r"part_\d{5}_of_(\d{5})\.parquet")
_LISTS = [field.name for field in _SCHEMA if pa.types.is_list(field.type)]
_PLAIN = [name for name in _SCHEMA.names if name not in _LISTS]
_MAYBE_NULL = ("extracted", "anchor", "mask")
_BYTE_SPLIT = [f"{name}.list.element" for name in _LISTS if name not in ("versions", "mask")]
"""Columns whose values rarely repeat. They compress better with byte-stream-split encoding."""


def write_rollouts(file: Path, trajectories: Sequence[Trajectory], *, routes: bool = True) -> None:
    """Write a Parquet file, zstd-compressed, atomically; reading returns the same bits.

    file: for all rollouts of a step, or a part of them (``part_file``), in batch order. routes: write the
    trajectories' routes, if they have any; either all have routes or none.
    Raises OSError, and then leaves no file. The run's folder must exist.
    """
    if file.parent.suffix == ".parquet":  # a part
        file.parent.parent.mkdir(exist_ok=True)
    file.parent.mkdir(exist_ok=True)
    encoding = {
        # Only where values repeat: otherwise a dictionary is built and then discarded.
        "use_dictionary": ["finish", "answer", "reason", "versions.list.element"],
        "use_byte_stream_split": _BYTE_SPLIT,
        "compression": "zstd",
        "write_page_checksum": True,
    }
    schema = _SCHEMA
    if routes and any(len(t.routes) for t in trajectories):
        schema = _with_routes(pa.from_numpy_dtype(trajectories[0].routes.dtype))
    with atomic_write(file) as sink, pq.ParquetWriter(sink, schema, **encoding) as writer:
        for chunk in batched(trajectories, _ROWS):
            writer.write_batch(to_batch(chunk, schema))


def iter_rollouts(file: Path) -> Iterator[Trajectory]:
    """The trajectories of a step in batch order, with the same bits as written, a few in memory at a time.

    For runs that others may have made: ``data/foreign_rollouts.py``.
    Raises UserError if the file, or a part of the folder, is damaged or missing.
    """
    names = files_of(file)
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(open_regular(name)) for name in names]
        except FileNotFoundError:
            raise
        except OSError as e:
            raise damaged(file, e) from None
        yield from iter_files(files, names)


def files_of(file: Path) -> list[Path]:
    """The files with a step's rollouts. Raises UserError if a part is missing."""
    if not file.is_dir():
        return [file]
    parts = _expected_parts(file)
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part}: missing; choose another step, or restore the file")
    return parts


def damaged(file: Path, error: Exception) -> UserError:
    """The message about rollouts that cannot be read."""
    reason = str(error).partition("\n")[0]
    return UserError(f"{file}: damaged ({reason}); choose another step, or restore the file")


def iter_files(
    files: Sequence[BinaryIO], names: Sequence[Path], *, confined: bool = False
) -> Iterator[Trajectory]:
    """The trajectories in the open files of a step. Raises UserError if one is damaged.

    names: of the files, for messages. confined: for a process that may have no threads; what is decoded is
    checked in full.
    """
    rows = max(1, _ROWS // len(files))
    parts = [_iter_part(file, name, rows, confined) for file, name in zip(files, names, strict=True)]
    return heapq.merge(*parts, key=lambda t: (t.group, t.sample, t.branch)) if len(parts) > 1 else parts[0]


def has_routes(file: Path) -> bool:
    """Whether the complete rollouts of a step have routes. Raises UserError if they are damaged."""
    parts = _expected_parts(file) if file.is_dir() else [file]
    try:
        # A leader without trajectories has no routes to write.
        columns = [pq.read_schema(p).names for p in parts if pq.read_metadata(p).num_rows]
    except (pa.ArrowException, OSError) as e:
        raise damaged(file, e) from None
    return all("routes" in names for names in columns)


def read_rollouts(file: Path) -> list[Trajectory]:
    """All trajectories of a step. Raises UserError as ``iter_rollouts`` does."""
    return list(iter_rollouts(file))


def rollouts_file(run: Path, step: int) -> Path:
    """Path of a step's rollouts in a run's folder."""
    return run / "rollouts" / f"step_{step:06d}.parquet"


def step_of(file: Path) -> int:
    """The step whose rollouts are in ``file``. Raises ValueError for other files."""
    return int(file.name[5:11])


def part_file(file: Path, number: int, count: int) -> Path:
    """Path of part ``number`` of ``count`` of a step's rollouts; a single part is the file itself."""
    return file if count == 1 else file / f"part_{number:05d}_of_{count:05d}.parquet"


def rollouts_complete(file: Path) -> bool:
    """Whether all parts of a step's rollouts are written."""
    if not file.is_dir():
        return file.is_file()
    return all(part.is_file() for part in _expected_parts(file))


def remove_rollouts(file: Path) -> None:
    """Remove a step's rollouts, complete or not, as a file or in parts. Raises OSError."""
    for part in file.parent.glob(f".{file.name}.*part"):  # left by ``atomic_write`` if it was killed
        remove(part)
    remove(file)


def list_rollouts(run: Path) -> list[Path]:
    """The complete rollouts of a run, in the order of the steps."""
    paths = (run / "rollouts").glob("step_*.parquet")
    steps = {step_of(file) for file in paths if file.name[5:11].isdecimal()}
    files = (rollouts_file(run, step) for step in sorted(steps))
    return [file for file in files if rollouts_complete(file)]


def find_rollouts(run: Path, step: int | None = None) -> Path:
    """The complete rollouts of a step, by default of the newest one. Raises UserError if there are none."""
    files = {step_of(file): file for file in list_rollouts(run)}
    if not files:
        raise UserError(f"{run}: has no rollouts yet; they are saved after each step")
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise UserError(f"{run}: has no rollouts of step {step}, but of {min(files)} to {max(files)}")
    return files[chosen]


def prune_rollouts(run: Path, settings: RolloutFilesSettings, newest: int) -> None:
    """Remove the rollouts of old steps as ``rollouts.keep`` says, but of no step after ``newest``.

    newest: step of the newest complete checkpoint. The newest rollouts are always kept. Raises OSError.
    """
    if settings.keep is None:
        return
    most, size = settings.keep_bytes, 0
    for number, file in enumerate(reversed(list_rollouts(run))):
        size += sum(part.lstat().st_size for part in (file.iterdir() if file.is_dir() else [file]))
        old = size > most if most is not None else number >= int(settings.keep)
        if old and number and step_of(file) <= newest:
            remove_rollouts(file)


def _expected_parts(folder: Path) -> list[Path]:
    """All parts of a folder. Their number is in the name of each one; an empty folder should have two."""
    counts = [int(m[1]) for f in folder.iterdir() if (m := _PART.fullmatch(f.name))]
    count = max(counts, default=2)
    return [part_file(folder, number, count) for number in range(count)]


def _iter_part(file: BinaryIO, name: Path, rows: int, confined: bool) -> Iterator[Trajectory]:
    try:
        yield from _iter_parquet(file, rows, confined)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as e:
        raise damaged(name, e) from None  # OSError: damage too


def _iter_parquet(file: BinaryIO, rows: int, confined: bool) -> Iterator[Trajectory]:
    # Buffering ahead takes threads.
    with pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=not confined) as opened:
        for batch in opened.iter_batches(rows, use_threads=not confined):
            if confined:
                batch.validate(full=True)
            yield from _from_batch(batch)


def _with_routes(kind: pa.DataType) -> pa.Schema:
    """The schema of files with routes; kind: uint8 or int16."""
    columns = pa.field("routes", pa.large_list(kind)), pa.field("routes_topk", pa.int32())
    return pa.schema([*_SCHEMA, *columns])


def to_batch(trajectories: Sequence[Trajectory], schema: pa.Schema = _SCHEMA) -> pa.RecordBatch:
    """A batch of rows; schema: with routes, or without."""
    columns: dict[str, Any] = {}
    if schema is not _SCHEMA:
        flat = np.concatenate([t.routes.reshape(-1) for t in trajectories])
        ends = np.cumsum([0, *(t.routes.size for t in trajectories)], dtype=np.int64)
        columns["routes"] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
        columns["routes_topk"] = pa.array([t.routes.shape[2] for t in trajectories], pa.int32())
    for field in _SCHEMA:
        values = [getattr(t, field.name) for t in trajectories]
        if field.name == "mask":
            columns["mask"] = pa.array([None if mask.all() else mask for mask in values], field.type)
        elif field.name in _LISTS:
            columns[field.name] = _to_lists(values, field.type)
        else:
            plain = [list(v.items()) for v in values] if field.name == "parts" else values
            columns[field.name] = pa.array(plain, field.type)
    same = [t.anchor is t.old or np.array_equal(_bits(t.anchor), _bits(t.old)) for t in trajectories]
    if all(same):
        columns["anchor"] = pa.nulls(len(same), _FLOATS)
    elif any(same):
        kept = [None if s else t.anchor for s, t in zip(same, trajectories, strict=True)]
        columns["anchor"] = pa.array(kept, _FLOATS)
    return pa.RecordBatch.from_pydict(columns, schema)


def _to_lists(values: Sequence[Any], kind: pa.ListType) -> pa.ListArray:
    ends = np.cumsum([0, *(len(v) for v in values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values), kind.value_type))


def _from_batch(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    for name in ("ticket", "branch"):
        if name not in batch.schema.names:
            batch = batch.append_column(name, pa.repeat(0, batch.num_rows))
    if "mask" not in batch.schema.names:
        batch = batch.append_column("mask", pa.nulls(batch.num_rows, _SCHEMA.field("mask").type))
    columns: dict[str, Any] = {name: batch.column(name) for name in _SCHEMA.names}
    for name, column in columns.items():
        if column.type != _SCHEMA.field(name).type or (column.null_count and name not in _MAYBE_NULL):
            raise ValueError(f"{name} is {column.type} with {column.null_count} nulls")
    plain = {name: columns[name].to_pylist() for name in _PLAIN}
    lists = {}
    for name in _LISTS:
        if columns[name].values.null_count:
            raise ValueError(f"{name} has nulls in its lists")
        ends = columns[name].offsets.to_numpy()
        values = columns[name].values.to_numpy(zero_copy_only=name != "mask")
        nulls = columns[name].is_null().to_pylist()
        lists[name] = [
            None if null else values[a:b].copy()
            for a, b, null in zip(ends[:-1], ends[1:], nulls, strict=True)
        ]
    routes = batch.column("routes") if "routes" in batch.schema.names else None
    for row in range(batch.num_rows):
        fields = {name: column[row] for name, column in (plain | lists).items()}
        fields["parts"] = dict(fields["parts"])
        if fields["anchor"] is None:
            fields["anchor"] = fields["old"].copy()
        if fields["mask"] is None:
            fields["mask"] = np.ones(len(fields["response"]), bool)
        elif len(fields["mask"]) != len(fields["response"]):
            raise ValueError(f"mask of group {fields['group']} does not have the length of the response")
        if routes is not None:
            rows = len(fields["prompt"]) + len(fields["response"]) - 1
            topk = batch.column("routes_topk")[row].as_py()
            fields["routes"] = routes[row].values.to_numpy().reshape(rows, -1, topk).copy()
        yield Trajectory(**fields)


def _bits(values: Any) -> Any:
    """The bits of float32 values, for an exact comparison: NaN equals itself, and 0 differs from -0."""
    return values.view(np.int32)

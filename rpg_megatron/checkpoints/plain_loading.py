"""Lets torch and Megatron load checkpoints without unpickling, by replacing parts of torch's reader.

Torch's reader unpickles three things: the index, each object, and a small header of each tensor. Within
``plain_loading``, all are interpreted in a process that can reach nothing (``foreign_reader.py``), and the
bytes of tensors are read straight from their files. So loading runs no code that a checkpoint refers to.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import msgspec
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from rpg_megatron.checkpoints.foreign_reader import AT_ONCE, NAME, TENSOR, TUPLE, Location
from rpg_megatron.checkpoints.index import StoredPart, read_index, to_torch
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import open_regular, places_of
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.system.foreign_input import ForeignInputError, plain_value, read_foreign

_READER = "rpg_megatron.checkpoints.foreign_reader"

_MAX_OBJECT = 1 << 30
"""Bytes of the tensors of an object; large tensors are stored as such, not in objects."""
_MAX_PARTS = 1000

_optimizers: dict[str, type] = {}


def allow_optimizers(*classes: type) -> None:
    """Also read the names of these classes in checkpoints.

    An optimizer with state in host memory writes the classes of its parts into its checkpoints.
    """
    _optimizers.update({f"{c.__module__}.{c.__qualname__}": c for c in classes})


allow_optimizers(torch.optim.AdamW)


@contextmanager
def plain_loading(folder: Path) -> Iterator[None]:
    """Within the block, torch and Megatron load checkpoints as this module describes.

    Not thread-safe. Raises UserError, which names ``folder``, if a file is missing or damaged.
    """
    from megatron.core.dist_checkpointing import serialization

    before = FileSystemReader.read_metadata, FileSystemReader.read_data, serialization.load_common
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign,assignment]
    FileSystemReader.read_data = _read_data  # type: ignore[method-assign,assignment]
    serialization.load_common = _load_common
    try:
        yield
    except CheckpointException as e:  # torch's, of the error of each rank
        for error in (failure[0] for failure in e.failures.values()):
            if isinstance(error, UserError):
                raise error from None
        raise _other_form(folder, next(iter(e.failures.values()))[0]) from e
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as e:
        # Of torch and Megatron, for values that they do not expect.
        raise _other_form(folder, e) from e
    finally:
        FileSystemReader.read_metadata, FileSystemReader.read_data = before[:2]  # type: ignore[method-assign]
        serialization.load_common = before[2]


def _other_form(folder: Path, error: BaseException) -> UserError:
    why = f"{type(error).__name__}: {shorten(str(error), 300)}"
    return UserError(f"{folder}: cannot be loaded as a checkpoint of this model ({why}); choose another one")


def _read_metadata(reader: Any, *_args: Any, **_kwargs: Any) -> Metadata:
    try:
        metadata = to_torch(read_index(Path(reader.path)))
    except ValueError as e:
        raise UserError(f"{reader.path}: not readable ({e}); copy the checkpoint again") from None
    metadata.storage_meta = StorageMeta(load_id=reader.load_id)
    return metadata


def _read_data(reader: Any, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    infos = [reader.storage_data[item.storage_index] for item in plan.items]
    names = sorted({info.relative_path for info in infos})
    number = {name: i for i, name in enumerate(names)}
    slices = [(number[i.relative_path], i.offset, i.length) for i in infos]
    objects = [item.type == LoadItemType.BYTE_IO for item in plan.items]
    folder = Path(reader.path)
    with _open_files(folder, names) as files:
        values = _read_objects(files, [s for s, is_object in zip(slices, objects, strict=True) if is_object])
        tensors = _locate(files, [s for s, is_object in zip(slices, objects, strict=True) if not is_object])
        for item, (file, _, _), is_object in zip(plan.items, slices, objects, strict=True):
            if is_object:
                copy = io.BytesIO()  # the planner unpickles: what is pickled here, of plain values
                torch.save(next(values), copy)
                copy.seek(0)
                planner.load_bytes(item, copy)
                continue
            location = next(tensors)
            if location.shape != _described_shape(planner, item):  # before memory is reserved
                raise ValueError(f"{item.storage_index.fqn} has the shape {list(location.shape)}")
            tensor = _read_tensor(files[file], location)
            for dim, (begin, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if dim >= tensor.ndim or begin + count > tensor.shape[dim]:
                    raise ValueError(f"{item.storage_index.fqn} has the shape {list(tensor.shape)}")
                tensor = tensor.narrow(dim, begin, count)
            target = planner.resolve_tensor(item).detach()
            if target.shape != tensor.shape:
                raise ValueError(f"{item.storage_index.fqn} has the shape {list(tensor.shape)}")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _described_shape(planner: Any, item: ReadItem) -> tuple[int, ...]:
    """The shape that the index gives for a stored chunk."""
    index = item.storage_index
    chunks = planner.metadata.state_dict_metadata[index.fqn].chunks
    guess = chunks[index.index] if index.index is not None and index.index < len(chunks) else None
    if guess is None or guess.offsets != index.offset:
        guess = next(chunk for chunk in chunks if chunk.offsets == index.offset)
    return tuple(guess.sizes)


def _load_common(folder: str) -> Any:
    """Content of ``common.pt``, in checkpoints of earlier versions of Megatron-Core."""
    return load_object(Path(folder), "common.pt")


def load_object(folder: Path, name: str) -> Any:
    """The plain values and tensors in a file of ``torch.save`` of a checkpoint. Raises UserError."""
    with _open_files(folder, [name]) as files:
        return next(_read_objects(files, [(0, 0, -1)]))


def locate_parts(folder: Path, parts: Sequence[StoredPart]) -> list[Location]:
    """Where the parts of tensors begin in their files. Raises UserError."""
    names = sorted({part.file for part in parts})
    number = {name: i for i, name in enumerate(names)}
    with _open_files(folder, names) as files:
        return list(_locate(files, [(number[p.file], p.begin, p.length) for p in parts]))


def read_part(file: Path, where: Location, box: Box) -> torch.Tensor:
    """A box of a part of a tensor. Only its rows are read, in the first dimension with several.

    Raises UserError.
    """
    dim = next((d for d, size in enumerate(where.shape) if size > 1), 0)
    shape, first = list(where.shape), where.offset + box.start[dim] * where.stride[dim]
    shape[dim] = box.extent[dim]
    with _open_files(file.parent, [file.name]) as (opened,):
        values = _read_tensor(opened, where._replace(shape=tuple(shape), offset=first))
    return values[tuple(slice(None) if d == dim else s for d, s in enumerate(box.slices()))]


@contextmanager
def _open_files(folder: Path, names: Sequence[str]) -> Iterator[list[BinaryIO]]:
    """Open files of a checkpoint. Errors of the block become a UserError that names the folder."""
    with ExitStack() as stack:
        try:
            inside = places_of(folder)
            yield [stack.enter_context(open_regular(folder / name, *inside)) for name in names]
        except OSError as e:
            raise UserError(
                f"{e.filename or folder}: cannot be read ({e.strerror}); copy the checkpoint again"
            ) from None
        except (ForeignInputError, ValueError) as e:
            raise UserError(f"{folder}: not readable ({e}); copy the checkpoint again") from None


def _read_objects(files: Sequence[BinaryIO], slices: Sequence[tuple[int, int, int]]) -> Iterator[Any]:
    if not slices:
        return
    values = read_foreign(f"{_READER}:read_objects", files, slices, msgspec.Raw, values=len(slices))
    for (number, _, _), value in zip(slices, values, strict=True):
        yield _decode(value, files[number], {}, {})


def _decode(
    value: msgspec.Raw | memoryview,
    file: BinaryIO,
    parts: dict[tuple[int, int], torch.Tensor],
    tuples: dict[bytes, Any],
) -> Any:
    """An object of ``foreign_reader.read_objects``, with its extension types.

    parts: first byte and bytes -> parts of the file that the object's tensors share. tuples: the object's
    tuples so far; equal ones are one object, as in an optimizer's groups, which are then saved as before.
    """

    def extension(code: int, data: memoryview) -> Any:
        if code == TUPLE:
            raw = bytes(data)
            if raw not in tuples:
                items = tuple(_decode(data, file, parts, tuples))
                if not all(isinstance(each, int | float | str | NoneType) for each in items):
                    return items
                tuples[raw] = items
            return tuples[raw]
        if code == TENSOR:
            return _read_tensor(file, msgspec.msgpack.decode(data, type=Location), parts)
        return _optimizers.get(msgspec.msgpack.decode(data, type=str)) if code == NAME else None

    return plain_value(value, extension)


def _locate(files: Sequence[BinaryIO], slices: Sequence[tuple[int, int, int]]) -> Iterator[Location]:
    """Where the tensors begin, one for each slice."""
    if slices:
        count = math.ceil(len(slices) / AT_ONCE)
        batches = read_foreign(f"{_READER}:locate_tensors", files, slices, list[Location], values=count)
        for _, location in zip(slices, chain.from_iterable(batches), strict=True):
            yield location


def _read_tensor(
    file: BinaryIO, where: Location, parts: dict[tuple[int, int], torch.Tensor] | None = None
) -> torch.Tensor:
    """Read a tensor from its file; of a storage that is larger, only what the tensor spans.

    parts: see ``_decode``. Raises ValueError if the file or the storage has too few bytes, or if those of an
    object are too many.
    """
    dtype = torch_dtype(where.dtype)
    if where.dtype.startswith(("quint", "qint", "bits")):
        raise ValueError(f"a tensor of dtype {where.dtype}")
    count = math.prod(where.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(where.shape, where.stride, strict=True)) if count else 0
    begin, size = where.begin + where.offset * dtype.itemsize, span * dtype.itemsize
    if count and max(where.offset + span, count) * dtype.itemsize > where.bytes:
        raise ValueError("a tensor is larger than its storage")
    if where.begin + where.bytes > os.fstat(file.fileno()).st_size:  # before memory is reserved
        raise ValueError("a file is truncated")
    if parts is None and span > 2 * count:  # tensors are stored without gaps
        raise ValueError(f"a tensor of {count} numbers is spread over {span}")
    if parts is None:
        part = _read_bytes(file, begin, size)
    else:
        if (begin, size) not in parts:
            if len(parts) >= _MAX_PARTS or size + sum(length for _, length in parts) > _MAX_OBJECT:
                raise ValueError(
                    f"an object with more than {_MAX_PARTS:,} tensors, or {_MAX_OBJECT >> 20:,} MiB"
                )
            parts[begin, size] = _read_bytes(file, begin, size)
        part = parts[begin, size]
    return part.view(dtype).as_strided(where.shape, where.stride)


def _read_bytes(file: BinaryIO, begin: int, size: int) -> torch.Tensor:
    part = torch.empty(size, dtype=torch.uint8)
    view, done = memoryview(part.numpy()), 0
    while done < size:
        count = os.preadv(file.fileno(), [view[done:]], begin + done)
        if count == 0:
            raise ValueError("a file is truncated")
        done += count
    return part


def drop_pickled_states(state: dict[str, Any]) -> None:
    """Remove a module's extra states that are pickles in byte tensors, which their layers would unpickle.

    Transformer Engine's FP8 layers have such states. state: the module's state dict. States of plain values,
    such as those of ``policy/fp8_emulation.py``, stay.
    """
    pickled = [
        name
        for name, value in state.items()
        if name.endswith("_extra_state") and not isinstance(value, dict | NoneType)
    ]
    for name in pickled:
        del state[name]

"""The index of a torch distributed checkpoint as plain values: its tensors and objects, and their places.

Torch writes it as a pickle (``.metadata``). We also write it as JSON (``.metadata.json``), so that our own
checkpoints are read without a pickle. A pickle is read only where the JSON is missing or belongs to another
one, in a process that can reach nothing (``system/foreign_input.py``). Both give an ``Index``, which is
checked here, and from which torch's own classes are made. Importing this needs no torch.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_own, open_regular, places_of
from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

INDEX = ".metadata"
"""Torch's index."""
PLAIN_INDEX = ".metadata.json"
MAX_SIZE = 2**62
"""Of a dimension, an offset or a file."""
_MAX_DIMENSIONS = 64
_SAME_HASH = 16
"""Offsets of a tensor with one hash: in millions there are not two by chance."""
_MAX_BYTES = 1 << 30
"""Of an index; one of a million pieces has 150 MB."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]


class Tensor(msgspec.Struct, frozen=True):
    """A full tensor, and the chunks that it is stored in."""

    dtype: str
    """As torch names it, without ``torch.``."""
    shape: Sizes
    chunks: list[tuple[Sizes, Sizes]]
    """Offset and shape of each."""


class StoredPart(msgspec.Struct, frozen=True, array_like=True):
    """Where a chunk of a tensor, or an object, is stored."""

    name: str
    """Of the tensor or object."""
    offset: Sizes | None
    """Of the chunk; None: an object."""
    number: Size | None
    """Position in the list of chunks, if it is known."""
    file: str
    """Path in the checkpoint's folder."""
    begin: Size
    length: Size
    """Bytes."""


class Index(msgspec.Struct, frozen=True):
    """A checkpoint's index."""

    tensors: dict[str, Tensor]
    objects: list[str]
    """Names of what are no tensors, such as FP8 scales."""
    pieces: list[StoredPart]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's tensors, without optimizer state."""
        return {n: t for n, t in self.tensors.items() if not n.startswith(("optimizer.", "chained_"))}

    @property
    def ends(self) -> dict[str, int]:
        """File -> minimum size in bytes."""
        ends: dict[str, int] = {}
        for piece in self.pieces:
            ends[piece.file] = max(ends.get(piece.file, 0), piece.begin + piece.length)
        return ends


class _File(msgspec.Struct):
    """Content of ``.metadata.json``."""

    sha256: str
    """Of the ``.metadata`` that it belongs to."""
    index: Index
    format: int = 1


def read_index(folder: Path) -> Index:
    """The index of a checkpoint. Raises UserError if it is missing, damaged or refers to other files."""
    file = folder / INDEX
    try:
        with open_regular(file, *places_of(folder)) as source:
            size = os.fstat(source.fileno()).st_size
            if size > _MAX_BYTES:
                raise ValueError(f"it has {size:,} bytes")
            index = _read_plain(folder, source)
            if index is None:
                source.seek(0)
                reader = "rpg_megatron.checkpoints.foreign_reader:read_index"
                # The same content is smaller as msgpack than as a pickle.
                (index,) = read_foreign(reader, [source], None, Index, largest=size + (1 << 20), values=1)
        _check(index)
    except OSError as e:
        raise UserError(f"{file}: not readable ({e.strerror}); copy the checkpoint again") from None
    except (ForeignInputError, ValueError) as e:
        raise UserError(f"{file}: not readable ({e}); copy the checkpoint again") from None
    return index


def _read_plain(folder: Path, pickled: Any) -> Index | None:
    """The index in JSON, if it belongs to the pickle that is open."""
    try:
        with open_regular(folder / PLAIN_INDEX, *places_of(folder)) as source:
            if os.fstat(source.fileno()).st_size > _MAX_BYTES:
                return None
            document = msgspec.json.decode(source.read(), type=_File)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return document.index if document.sha256 == hashlib.sha256(pickled.read()).hexdigest() else None


def _check(index: Index) -> None:
    """Raise ValueError for an index whose parts do not belong together."""
    # By text: the hash of numbers has no secret, so that many offsets with one hash can be chosen, and take a
    # time that is quadratic. Torch keys by numbers, so those are refused.
    chunks: dict[str, set[str]] = {}
    for name, tensor in index.tensors.items():
        if math.prod(tensor.shape) > MAX_SIZE // 8:
            raise ValueError(f"{name!r} is larger than any file")
        for offset, shape in tensor.chunks:
            if not len(offset) == len(shape) == len(tensor.shape) or any(
                a + b > c for a, b, c in zip(offset, shape, tensor.shape, strict=True)
            ):
                raise ValueError(f"a part of {name!r} is outside it")
        chunks[name] = {str(offset) for offset, _ in tensor.chunks}
        hashes = Counter(hash(offset) for offset, _ in tensor.chunks)
        if max(hashes.values(), default=0) > _SAME_HASH:
            raise ValueError(f"the parts of {name!r} are chosen to take long")
    objects = set(index.objects)
    for piece in index.pieces:
        path = PurePosixPath(piece.file)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in piece.file:
            raise ValueError(f"{piece.file!r} is outside the checkpoint's folder")
        if piece.offset is None and piece.name not in objects and piece.name not in chunks:
            raise ValueError(f"{piece.name!r} is stored, but not described")
        if piece.offset is not None and str(piece.offset) not in chunks.get(piece.name, ()):
            raise ValueError(f"a part of {piece.name!r} is stored, but not described")


def write_plain_index(folder: Path, index: Index) -> None:
    """Write ``.metadata.json`` beside torch's ``.metadata``, which exists, and fsync it. Raises OSError."""
    with open_regular(folder / INDEX) as pickled:
        digest = hashlib.sha256(pickled.read()).hexdigest()
    with open_own(folder / PLAIN_INDEX, "wb") as file:
        file.write(msgspec.json.encode(_File(digest, index)))
        file.flush()
        os.fsync(file.fileno())


# -- torch's classes -----------------------------------------------------------------------------------------


def from_torch(metadata: Metadata, pieces: list[StoredPart]) -> Index:
    """The index of a save. metadata: torch's plan of it; pieces: what was written."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from rpg_megatron.system.dtypes import dtype_name

    tensors = {
        name: Tensor(
            dtype_name(t.properties.dtype),
            tuple(t.size),
            [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in t.chunks],
        )
        for name, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }
    objects = [name for name in metadata.state_dict_metadata if name not in tensors]
    return Index(tensors, objects, pieces)


def stored_part(key: MetadataIndex, info: _StorageInfo) -> StoredPart:
    """Where torch has stored a chunk or an object."""
    offset = None if key.offset is None else tuple(key.offset)
    return StoredPart(key.fqn, offset, key.index, info.relative_path, info.offset, info.length)


def to_torch(index: Index) -> Metadata:
    """The same as torch's class, for its loader. Raises ValueError for an unknown dtype."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from rpg_megatron.system.dtypes import torch_dtype

    described: dict[str, Any] = {name: BytesStorageMetadata() for name in index.objects}
    for name, t in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in t.chunks]
        properties = TensorProperties(dtype=torch_dtype(t.dtype))
        described[name] = TensorStorageMetadata(properties, torch.Size(t.shape), chunks)
    stored = {
        MetadataIndex(p.name, p.offset, p.number): _StorageInfo(p.file, p.begin, p.length)
        for p in index.pieces
    }
    return Metadata(described, storage_data=stored)

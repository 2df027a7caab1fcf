"""Readers of Megatron checkpoints for ``system/foreign_input.py``: index, objects, and where tensors begin.

They run in a process that can reach nothing. A pickle is interpreted (``pickle_values.py``), never loaded.
The bytes of tensors stay in their files: the caller reads them from the position that is found here.
Formats: torch.distributed.checkpoint's ``.metadata``; torch.save's zip archives, stored without compression.
"""

from __future__ import annotations

import codecs
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import batched
from typing import Any, BinaryIO, NamedTuple

import msgspec

from rpg_megatron.checkpoints.index import Index, Size, Sizes, StoredPart, Tensor
from rpg_megatron.checkpoints.pickle_values import Name, Pairs, Record, Reference, load_values

_MAX_PICKLE = 64 << 20
"""Bytes of an object's pickle; those of tensors have a few hundred."""
_MAX_VALUES, _MAX_LEVELS = 1_000_000, 100
"""Of an object. A pickle can use one value at many places, and each would be copied."""
AT_ONCE = 1000
"""Tensors located in one answer."""
_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
TUPLE, TENSOR, NAME = 1, 2, 3
"""Extension types of msgpack in the values of objects."""

Slice = tuple[int, int, int]
"""Part of a file: its number, first byte, and bytes."""


class Location(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: Sizes
    stride: Sizes
    """In elements."""
    offset: Size
    """Of its first element in the storage, in elements."""
    begin: Size
    """Of the storage in the file, in bytes."""
    bytes: Size
    """Of the storage."""


def prepare() -> None:
    """Load what is loaded late: encodings of zip archives and of early pickles, types of msgspec."""
    for name in ("cp437", "raw_unicode_escape", "latin-1"):
        codecs.lookup(name)
    for kind in (Tensor, StoredPart, Location):
        with suppress(msgspec.ValidationError):
            msgspec.convert(None, kind)


def read_index(files: Sequence[BinaryIO], _argument: object) -> Iterator[Index]:
    """The index in a ``.metadata`` file."""
    metadata = _attributes(load_values(files[0].read()), "Metadata")
    tensors: dict[str, Tensor] = {}
    objects: list[str] = []
    for key, value in _pairs(metadata.get("state_dict_metadata")):
        name = msgspec.convert(key, str)
        if type(value) is Record and _class(value) == "TensorStorageMetadata":
            tensors[name] = _tensor(_attributes(value, "TensorStorageMetadata"))
        else:
            objects.append(name)
    yield Index(tensors, objects, [_piece(*pair) for pair in _pairs(metadata.get("storage_data"))])


def _tensor(attributes: Pairs) -> Tensor:
    properties = attributes.get("properties")
    state = properties.state if type(properties) is Record else None
    dtype: Any = None
    if type(state) is Pairs:  # written by earlier versions of torch
        dtype = state.get("dtype")
    elif type(state) is tuple and state:
        dtype = state[0]
    if type(dtype) is not Name or dtype.module != "torch":
        raise ValueError("not an index of tensors: a tensor without dtype")
    chunks = []
    for chunk in msgspec.convert(attributes.get("chunks"), list):
        fields = _attributes(chunk, "ChunkStorageMetadata")
        chunks.append((_sizes(fields.get("offsets")), _sizes(fields.get("sizes"))))
    described = {"dtype": dtype.name, "shape": _sizes(attributes.get("size")), "chunks": chunks}
    return msgspec.convert(described, Tensor)


def _piece(key: Any, value: Any) -> StoredPart:
    index, info = _attributes(key, "MetadataIndex"), _attributes(value, "_StorageInfo")
    if info.get("transform_descriptors"):
        raise ValueError("its files are encoded by an extension of torch")
    place = info.get("relative_path"), info.get("offset"), info.get("length")
    part = index.get("fqn"), _sizes(index.get("offset")), index.get("index"), *place
    return msgspec.convert(part, StoredPart)


def locate_tensors(files: Sequence[BinaryIO], slices: list[Slice]) -> Iterator[list[Location]]:
    """Where the tensors in these slices begin, some at a time."""
    for chunk in batched(slices, AT_ONCE):
        locations = []
        for number, begin, length in chunk:
            archive = _Archive(files[number], begin, length)
            locations.append(archive.locate(archive.value()))
        yield locations


def read_objects(files: Sequence[BinaryIO], slices: list[Slice]) -> Iterator[Any]:
    """The objects in these slices, one at a time; length -1: the rest of the file.

    Values of torch's and Python's own classes are plain values, or extension types; what else a pickle may
    create becomes None.
    """
    for number, begin, length in slices:
        archive = _Archive(files[number], begin, length)
        yield _plain(archive.value(), archive)


class _Archive:
    """A file of torch.save, in a slice of a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        size = os.lseek(file.fileno(), 0, os.SEEK_END)
        length = size - begin if length < 0 else length
        if begin + length > size:
            raise ValueError("a file is truncated")
        self._begin = begin
        self._file = _Slice(file.fileno(), begin, length)
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._members = {m.filename.partition("/")[2]: m for m in self._zip.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, OSError) as e:
            raise ValueError(f"not a file of torch.save ({e})") from None

    def value(self) -> Any:
        """The interpreted pickle."""
        if "byteorder" in self._members and self._read("byteorder", 16) != b"little":
            raise ValueError("written on a big-endian machine")
        return load_values(self._read("data.pkl", _MAX_PICKLE))

    def _read(self, name: str, limit: int) -> bytes:
        begin, size = self._find(name)
        if size > limit:
            raise ValueError(f"{name} has {size:,} bytes")
        return self._file.read_at(begin, size)

    def _find(self, name: str) -> tuple[int, int]:
        """First byte, in the slice, and bytes of a member."""
        member = self._members.get(name)
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"not a file of torch.save: no uncompressed {name}")
        header = self._file.read_at(member.header_offset, 30)
        begin = member.header_offset + 30 + int.from_bytes(header[26:28], "little")
        begin += int.from_bytes(header[28:30], "little")
        if begin + member.file_size > self._file.size:
            raise ValueError("a file is truncated")
        return begin, member.file_size

    def locate(self, value: Any) -> Location:
        """The location of an interpreted tensor."""
        while type(value) is Record and _class(value) == "_rebuild_parameter":
            value = value.arguments[0] if type(value.arguments) is tuple and value.arguments else None
        if type(value) is not Record or _class(value) not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            raise ValueError("not a tensor")
        if type(value.arguments) is not tuple or len(value.arguments) < 6 + (_class(value)[-1] == "3"):
            raise ValueError("not a tensor")
        storage, offset, shape, stride = value.arguments[:4]
        key = storage.key if type(storage) is Reference else None
        if type(key) is not tuple or len(key) != 5 or type(key[1]) is not Name or type(key[2]) is not str:
            raise ValueError("a tensor without storage")
        dtype = _DTYPES.get(key[1].name, "")
        if _class(value) == "_rebuild_tensor_v3":
            dtype = value.arguments[6].name if type(value.arguments[6]) is Name else ""
        begin, size = self._find(f"data/{key[2]}")
        location = dtype, _sizes(shape), _sizes(stride), offset, self._begin + begin, size
        return msgspec.convert(location, Location)


class _Slice:
    """A part of a file, as a file: position and reads are its own."""

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor, self._begin, self.size, self._at = descriptor, begin, size, 0

    def read_at(self, position: int, count: int) -> bytes:
        """Bytes from a position. Raises ValueError at the end."""
        if position < 0 or count < 0 or position + count > self.size:
            raise ValueError("a file is truncated")
        data = os.pread(self._descriptor, count, self._begin + position)
        if len(data) != count:
            raise ValueError("a file is truncated")
        return data

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence] + offset)
        return self._at

    def read(self, count: int = -1) -> bytes:
        remaining = max(0, self.size - self._at)
        data = self.read_at(self._at, remaining if count is None or count < 0 else min(count, remaining))
        self._at += len(data)
        return data


def _plain(value: Any, archive: _Archive) -> Any:
    budget = iter(range(_MAX_VALUES))

    def extension(code: int, content: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))

    def walk(item: Any, level: int) -> Any:
        if next(budget, None) is None or level > _MAX_LEVELS:
            raise ValueError("its values are nested too deeply or too many")
        if type(item) is list:
            return [walk(each, level + 1) for each in item]
        if type(item) is tuple:
            return extension(TUPLE, [walk(each, level + 1) for each in item])
        if type(item) is Pairs:
            return {k: walk(v, level + 1) for k, v in item.items if type(k) in (str, int)}
        if type(item) is Name:
            return extension(NAME, str(item))
        if type(item) is Record:
            kind = str(item.maker)
            if kind == "collections.OrderedDict":
                return walk(Pairs(_pairs(item)), level + 1)
            if kind.startswith("torch._utils._rebuild_"):
                return extension(TENSOR, archive.locate(item))
            if kind == "_codecs.encode":
                return _bytes(item)
            return None
        if type(item) is int and not -(2**63) <= item < 2**64:
            return None
        return item if item is None or type(item) in (bool, int, float, str, bytes) else None

    return walk(value, 0)


# -- interpreted values --------------------------------------------------------------------------------------


def _class(value: Record) -> str:
    return value.maker.name if type(value.maker) is Name else ""


def _attributes(value: Any, name: str) -> Pairs:
    if type(value) is not Record or _class(value) != name or type(value.state) is not Pairs:
        raise ValueError(f"not an index of tensors: no {name}")
    return value.state


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    ordered = type(value) is Record and _class(value) == "OrderedDict"
    if type(value) is not Pairs and not (ordered and all(type(pair) is tuple for pair in value.items)):
        raise ValueError("not an index of tensors: no dictionary")
    items: list[tuple[Any, Any]] = value.items
    return items


def _sizes(value: Any) -> Any:
    """Of a tuple or torch.Size, not checked."""
    size = type(value) is Record and _class(value) == "Size" and type(value.arguments) is tuple
    return next(iter(value.arguments), None) if size else value


def _bytes(value: Any) -> bytes:
    """Bytes; before protocol 3, they are stored as text to encode."""
    if type(value) is Record and str(value.maker) == "_codecs.encode" and type(value.arguments) is tuple:
        text = value.arguments[0] if value.arguments else None
        value = text.encode("latin-1") if type(text) is str else None
    if type(value) is not bytes:
        raise ValueError("bytes of another form")
    return value

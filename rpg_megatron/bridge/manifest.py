"""The manifest of published weights: which trainer rank holds which box of which HF tensor. No torch.

It is JSON: a file next to the weight files where memory is shared, otherwise a value in the trainers'
key-value store. File names have no folder: the reader decides where to look for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rpg_megatron.config.files import read_text
from rpg_megatron.models.boxes import Box, check_cover
from rpg_megatron.system.dtypes import ITEM_BYTES

MANIFEST = "manifest.json"
HEADER_BYTES = 64
"""Size of the header of each weight file; its first 8 bytes are the version, a native signed integer."""

WRITING = -1
"""Version word of a file whose weights must not be read (not yet, or no longer)."""

CHECKSUM_MODULUS = 1 << 64


@dataclass(frozen=True)
class Copy:
    """One copy of a shard, in the memory of a GPU; see ``cuda_ipc``."""

    rank: int
    """Trainer rank that owns the memory."""
    gpu: str
    """UUID of its GPU."""
    handle: str
    """CUDA IPC handle of the memory."""


@dataclass(frozen=True)
class Shard:
    """A file or memory allocation of a trainer rank; with ``process_group``, all weights that it sends."""

    rank: int
    """Trainer rank that holds it."""
    size: int
    """In bytes; for a file, header included."""
    file: str = ""
    """Name of the file; empty if there is none."""
    copies: tuple[Copy, ...] = ()
    """Only ``cuda_ipc``: copies on GPUs, the rank's own and those of the other replicas on its node, by rank.
    """
    replicas: tuple[tuple[int, str], ...] = ()
    """Only ``process_group``: the ranks that hold the same parameters, itself included, ascending; each with
    its ``node_name`` if engines are colocated, else "".
    """

    def __str__(self) -> str:
        """File and trainer rank, for messages."""
        return f"{self.file} of trainer rank {self.rank}" if self.file else f"trainer rank {self.rank}"


@dataclass(frozen=True)
class PublishedBox:
    """One box of an HF tensor inside one shard."""

    shard: int
    """Index into ``Manifest.shards``."""
    offset: int
    """Byte offset of the whole parameter (not of the box) in the shard; 0 with transport ``process_group``.
    """
    param_shape: tuple[int, ...]
    local: Box
    """The box within the parameter."""
    hf: Box
    """The box within the HF tensor."""
    shared_with: tuple[int, ...] = ()
    """Only ``process_group``: indices of the other shards that hold the same box (norms under tensor
    parallelism).
    """


@dataclass(frozen=True)
class PublishedTensor:
    """One HF tensor: element type as torch names it (``bfloat16``), full shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[PublishedBox, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """What rarely changes from one version to the next: where the weights are. Equal only to itself."""

    shards: tuple[Shard, ...]
    tensors: dict[str, PublishedTensor]

    def to_json(self) -> bytes:
        """JSON for ``Manifest.layout``."""
        return msgspec.json.encode(self)

    @cached_property
    def boxes(self) -> npt.NDArray[np.int64]:
        """Number of boxes before each tensor."""
        return np.cumsum([0, *(len(t.boxes) for t in self.tensors.values())])

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each tensor."""
        return {name: i for i, name in enumerate(self.tensors)}

    @cached_property
    def nbytes(self) -> npt.NDArray[np.uint64]:
        """Bytes of each tensor."""
        return np.array([math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in self.tensors.values()], np.uint64)


EMPTY = Layout((), {}).to_json()
"""The layout of nothing."""


@dataclass(frozen=True)
class Manifest:
    """One version of published weights."""

    transport: str
    """``shared_memory``, ``cuda_ipc`` or ``process_group``."""
    place: dict[str, Any]
    """What a reader needs to locate the weights; depends on the transport."""
    version: int
    layout: bytes
    """``Layout`` as JSON: the same bytes for versions that have the same one, so that it is read once."""
    sums: tuple[int, ...]
    """Checksum of each box, in the order of the layout."""
    scale: float = 0.0
    """Scale of B A x of the adapters among the tensors; 0: there are none."""

    @cached_property
    def parsed(self) -> Layout:
        """The layout, the same object for the same bytes."""
        return read_layout(self.layout)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Files or allocations of the trainer ranks."""
        return self.parsed.shards

    @property
    def tensors(self) -> dict[str, PublishedTensor]:
        """The tensors by HF name."""
        return self.parsed.tensors

    def box_sums(self, name: str) -> tuple[int, ...]:
        """Checksum of each box of a tensor."""
        first = self.parsed.index[name]
        return self.sums[self.parsed.boxes[first] : self.parsed.boxes[first + 1]]

    def checksum(self, name: str) -> int:
        """Of a whole tensor: the sum of its boxes' checksums, modulo 2**64."""
        return sum(self.box_sums(name)) % CHECKSUM_MODULUS

    @cached_property
    def totals(self) -> tuple[list[str], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Names, checksums and bytes of the tensors."""
        layout = self.parsed
        before = np.cumsum(np.array((0, *self.sums), np.uint64))  # wraps modulo 2**64
        return list(layout.tensors), np.diff(before[layout.boxes]), layout.nbytes

    def to_json(self) -> str:
        """JSON for ``parse_manifest``; without ``place``, which the reader already has."""
        text = _Text(self.transport, self.version, self.scale, self.sums, msgspec.Raw(self.layout))
        return msgspec.json.encode(text).decode()


class _Text(msgspec.Struct):
    """A manifest's JSON."""

    transport: str
    version: int
    scale: float
    sums: tuple[int, ...]
    layout: msgspec.Raw


@lru_cache(maxsize=2)  # of 40,000 tensors it takes some 100 MB
def read_layout(text: bytes) -> Layout:
    """The layout that ``Layout.to_json`` wrote. Raises ValueError if it is none, MappingError if boxes do not
    cover their tensor exactly.
    """
    layout = msgspec.json.decode(text, type=Layout)
    for name, tensor in layout.tensors.items():
        check_cover(name, tensor.shape, [b.hf for b in tensor.boxes])
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has the unknown dtype {tensor.dtype!r}")
        shards = range(len(layout.shards))
        if any(i not in shards for b in tensor.boxes for i in (b.shard, *b.shared_with)):
            raise ValueError(f"{name} is in a shard that is not listed")
    return layout


def parse_manifest(text: str, place: dict[str, Any]) -> Manifest:
    """The manifest that ``to_json`` wrote. Raises ValueError if ``text`` is not a manifest."""
    try:
        raw = msgspec.json.decode(text, type=_Text)
        layout = bytes(raw.layout)
        boxes = int(read_layout(layout).boxes[-1])
        if len(raw.sums) != boxes:
            raise ValueError(f"{len(raw.sums)} checksums of {boxes} boxes")
        if not all(0 <= number < CHECKSUM_MODULUS for number in raw.sums):
            raise ValueError("a checksum has more than 64 bits")
    except ValueError as e:  # also msgspec's errors
        raise ValueError(f"not a manifest of published weights ({type(e).__name__}: {e})") from None
    return Manifest(raw.transport, place, raw.version, layout, raw.sums, raw.scale)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises OSError if the file is missing, ValueError if it is not a manifest."""
    return parse_manifest(read_text(path), {"manifest": str(path)})

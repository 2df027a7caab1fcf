"""What a publication says of itself: which trainer rank holds which box of which HF tensor. No torch.

It travels as JSON: in a file next to the weight files where memory is shared, in the trainers' key-value
store where it is not. It names files without a folder, so that a reader decides for itself where it looks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.models.boxes import Box

MANIFEST = "manifest.json"
HEADER_BYTES = 64
"""Start of each weight file; its first 8 bytes are the version, as a native signed integer."""

WRITING = -1
"""Version word of a file whose weights are not, or no longer, to be read."""

CHECKSUM_MODULUS = 1 << 64


@dataclass(frozen=True)
class Copy:
    """A shard's values in the memory of a GPU; see ``cuda_ipc``."""

    rank: int
    """Trainer rank whose memory it is."""
    gpu: str
    """UUID of its GPU."""
    handle: str
    """CUDA IPC handle of the memory."""


@dataclass(frozen=True)
class Shard:
    """One piece of a trainer rank's memory, or all that it sends."""

    rank: int
    """Trainer rank that holds it."""
    size: int
    """In bytes; of a file, header included."""
    file: str = ""
    """Name of the file, where there is one."""
    copies: tuple[Copy, ...] = ()
    """Where it is read on a GPU: the rank's own memory and that of the node's other replicas, by rank."""

    def __str__(self) -> str:
        """For messages: whose it is, and which file."""
        return f"{self.file} of trainer rank {self.rank}" if self.file else f"trainer rank {self.rank}"


@dataclass(frozen=True)
class PublishedBox:
    """One box of an HF tensor inside one shard."""

    shard: int
    """Index into ``Manifest.shards``."""
    offset: int
    """Byte of the shard at which the whole parameter (not the box) begins; 0 where parameters are sent."""
    param_shape: tuple[int, ...]
    local: Box
    """The box within the parameter."""
    hf: Box
    """The box within the HF tensor."""
    checksum: int


@dataclass(frozen=True)
class PublishedTensor:
    """One HF tensor: element type as torch names it (``bfloat16``), full shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[PublishedBox, ...]

    @property
    def checksum(self) -> int:
        """Of the whole tensor: checksums of a partition add up."""
        return sum(b.checksum for b in self.boxes) % CHECKSUM_MODULUS


@dataclass(frozen=True)
class Manifest:
    """One version of published weights."""

    transport: str
    """``shared_memory``, ``cuda_ipc`` or ``process_group``."""
    place: dict[str, Any]
    """What a reader needs to find it; see the transport."""
    version: int
    shards: tuple[Shard, ...]
    tensors: dict[str, PublishedTensor]

    def to_json(self) -> str:
        """For ``read_manifest``; ``place`` is not in it, since who reads it has found it."""
        tensors = {
            name: {
                "dtype": t.dtype,
                "shape": t.shape,
                "boxes": [
                    [b.shard, b.offset, b.param_shape, b.local.start, b.hf.start, b.hf.extent, b.checksum]
                    for b in t.boxes
                ],
            }
            for name, t in self.tensors.items()
        }
        shards = [
            {
                "rank": s.rank,
                "size": s.size,
                "file": s.file,
                "copies": [[c.rank, c.gpu, c.handle] for c in s.copies],
            }
            for s in self.shards
        ]
        whole = {
            "transport": self.transport,
            "version": self.version,
            "shards": shards,
            "tensors": tensors,
        }
        return json.dumps(whole)


def parse_manifest(text: str, place: dict[str, Any]) -> Manifest:
    """The manifest that ``to_json`` wrote. Raises ValueError if it is none."""
    try:
        raw: dict[str, Any] = json.loads(text)
        shards = tuple(
            Shard(
                int(s["rank"]),
                int(s["size"]),
                str(s["file"]),
                tuple(Copy(int(rank), str(gpu), str(handle)) for rank, gpu, handle in s["copies"]),
            )
            for s in raw["shards"]
        )
        tensors = {
            name: PublishedTensor(str(t["dtype"]), tuple(t["shape"]), tuple(map(_box, t["boxes"])))
            for name, t in raw["tensors"].items()
        }
        return Manifest(str(raw["transport"]), place, int(raw["version"]), shards, tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"not a manifest of published weights ({type(e).__name__}: {e})") from None


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises OSError if it is missing, ValueError if it is none."""
    return parse_manifest(path.read_text(encoding="utf-8"), {"manifest": str(path)})


def _box(raw: list[Any]) -> PublishedBox:
    shard, offset, shape, local, hf, extent, total = raw
    return PublishedBox(
        int(shard),
        int(offset),
        tuple(shape),
        Box(tuple(local), tuple(extent)),
        Box(tuple(hf), tuple(extent)),
        int(total),
    )

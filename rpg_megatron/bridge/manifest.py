"""The manifest of published weights: which trainer rank holds which box of which HF tensor. No torch.

It is JSON: a file next to the weight files where memory is shared, otherwise a value in the trainers'
key-value store. File names have no folder: the reader decides where to look for them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rpg_megatron.config.files import read_text
from rpg_megatron.models.boxes import Box
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
    checksum: int
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

    @property
    def checksum(self) -> int:
        """Of the whole tensor: the sum of its boxes' checksums, modulo 2**64."""
        return sum(b.checksum for b in self.boxes) % CHECKSUM_MODULUS


@dataclass(frozen=True)
class Manifest:
    """One version of published weights."""

    transport: str
    """``shared_memory``, ``cuda_ipc`` or ``process_group``."""
    place: dict[str, Any]
    """What a reader needs to locate the weights; depends on the transport."""
    version: int
    shards: tuple[Shard, ...]
    tensors: dict[str, PublishedTensor]
    scale: float = 0.0
    """Scale of B A x of the adapters among the tensors; 0: there are none."""

    @cached_property
    def totals(self) -> tuple[list[str], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Names, checksums and bytes of the tensors."""
        nbytes = [math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in self.tensors.values()]
        sums = [t.checksum for t in self.tensors.values()]
        return list(self.tensors), np.array(sums, np.uint64), np.array(nbytes, np.uint64)

    def to_json(self) -> str:
        """JSON for ``parse_manifest``; without ``place``, which the reader already has."""
        tensors = {
            name: {
                "dtype": t.dtype,
                "shape": t.shape,
                "boxes": [
                    [
                        *(
                            b.shard,
                            b.offset,
                            b.param_shape,
                            b.local.start,
                            b.hf.start,
                            b.hf.extent,
                            b.checksum,
                        ),
                        *b.shared_with,
                    ]
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
                "replicas": s.replicas,
            }
            for s in self.shards
        ]
        whole = {
            "transport": self.transport,
            "version": self.version,
            "scale": self.scale,
            "shards": shards,
            "tensors": tensors,
        }
        return json.dumps(whole)


def parse_manifest(text: str, place: dict[str, Any]) -> Manifest:
    """The manifest that ``to_json`` wrote. Raises ValueError if ``text`` is not a manifest."""
    try:
        raw: dict[str, Any] = json.loads(text)
        shards = tuple(
            Shard(
                int(s["rank"]),
                int(s["size"]),
                str(s["file"]),
                tuple(Copy(int(rank), str(gpu), str(handle)) for rank, gpu, handle in s["copies"]),
                tuple((int(rank), str(node)) for rank, node in s["replicas"]),
            )
            for s in raw["shards"]
        )
        tensors = {
            name: PublishedTensor(str(t["dtype"]), tuple(t["shape"]), tuple(map(_box, t["boxes"])))
            for name, t in raw["tensors"].items()
        }
        scale = float(raw["scale"])
        return Manifest(str(raw["transport"]), place, int(raw["version"]), shards, tensors, scale)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"not a manifest of published weights ({type(e).__name__}: {e})") from None


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises OSError if the file is missing, ValueError if it is not a manifest."""
    return parse_manifest(read_text(path), {"manifest": str(path)})


def _box(raw: list[Any]) -> PublishedBox:
    shard, offset, shape, local, hf, extent, total, *shared_with = raw
    return PublishedBox(
        int(shard),
        int(offset),
        tuple(shape),
        Box(tuple(local), tuple(extent)),
        Box(tuple(hf), tuple(extent)),
        int(total),
        tuple(map(int, shared_with)),
    )

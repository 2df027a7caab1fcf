"""What a publication says of itself: which file holds which box of which HF tensor. No torch.

The manifest is a JSON file next to the weight files. It names them without a folder, so that a reader
decides for itself where it looks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.bridge.plan import Box

MANIFEST = "manifest.json"
HEADER_BYTES = 64
"""Start of each weight file; its first 8 bytes are the generation, as a native signed integer."""

WRITING = -1
"""Generation word of a file that is being overwritten."""

CHECKSUM_MODULUS = 1 << 64


@dataclass(frozen=True)
class PublishedFile:
    """One trainer rank's weight file."""

    name: str
    size: int
    """In bytes, header included."""
    rank: int
    """Trainer rank that writes it."""


@dataclass(frozen=True)
class PublishedBox:
    """One box of an HF tensor inside one shard."""

    file: int
    """Index into ``Manifest.files``."""
    offset: int
    """Byte at which the whole shard (not the box) begins in the file."""
    shard_shape: tuple[int, ...]
    local: Box
    """The box within the shard."""
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
    """One generation of published weights."""

    path: Path
    generation: int
    files: tuple[PublishedFile, ...]
    tensors: dict[str, PublishedTensor]

    def write(self) -> None:
        """Write the file and rename it into place: readers see the old one or the new one, never half."""
        tensors = {
            name: {
                "dtype": t.dtype,
                "shape": t.shape,
                "checksum": t.checksum,
                "boxes": [
                    {
                        "file": b.file,
                        "offset": b.offset,
                        "shard_shape": b.shard_shape,
                        "local_start": b.local.start,
                        "hf_start": b.hf.start,
                        "extent": b.hf.extent,
                        "checksum": b.checksum,
                    }
                    for b in t.boxes
                ],
            }
            for name, t in self.tensors.items()
        }
        files = [{"name": f.name, "size": f.size, "rank": f.rank} for f in self.files]
        text = json.dumps({"generation": self.generation, "files": files, "tensors": tensors})
        write_private(self.path, text)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises OSError if it is missing, ValueError if it is not a manifest."""
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        files = tuple(PublishedFile(str(f["name"]), int(f["size"]), int(f["rank"])) for f in raw["files"])
        tensors = {
            name: PublishedTensor(str(t["dtype"]), tuple(t["shape"]), tuple(map(_box, t["boxes"])))
            for name, t in raw["tensors"].items()
        }
        return Manifest(path, int(raw["generation"]), files, tensors)
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not a manifest of published weights ({type(e).__name__}: {e})") from None


def _box(raw: dict[str, Any]) -> PublishedBox:
    extent = tuple(raw["extent"])
    return PublishedBox(
        int(raw["file"]),
        int(raw["offset"]),
        tuple(raw["shard_shape"]),
        Box(tuple(raw["local_start"]), extent),
        Box(tuple(raw["hf_start"]), extent),
        int(raw["checksum"]),
    )


def write_private(path: Path, text: str) -> None:
    """Write a text file of mode 0600 through a temporary name and a rename."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(part, path)

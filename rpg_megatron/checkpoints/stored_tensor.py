"""One tensor of a checkpoint, as its headers or its index describe it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: file, dtype as in the header (F32, BF16, F16, ...), shape, first byte, and
    its name there, which may be an older form of that in a mapping. start: of a matrix of a larger tensor,
    the index at which it begins there. scale: of a tensor in FP8, whose dtype here is BF16, as it is read.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    name: str = ""
    start: tuple[int, ...] = ()
    scale: StoredTensor | None = None

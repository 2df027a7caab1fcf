"""What the kernels of ``bridge/slice_kernels`` do, in numpy on ordinary memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rpg_megatron.bridge.checksum import checksum


@dataclass(frozen=True)
class Matrix:
    """A slice in memory; strides in elements of ``size`` bytes."""

    address: int
    shape: tuple[int, int]
    strides: tuple[int, int]
    size: int

    @property
    def reach(self) -> int:
        """Bytes from its first to its last."""
        return (sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1) * self.size

    def values(self) -> npt.NDArray[Any]:
        memory = (ctypes.c_char * self.reach).from_address(self.address)
        first = np.frombuffer(memory, f"u{self.size}")
        strides = [s * self.size for s in self.strides]
        return np.lib.stride_tricks.as_strided(first, self.shape, strides)


def slices_of(
    table: npt.NDArray[np.int64], size: int
) -> Iterator[tuple[int, Matrix, tuple[int, int], Matrix]]:
    """Of each row that is not empty: index, slice, start, target."""
    for i, row in enumerate(table.tolist()):
        if row[1]:
            shape = row[1], row[2]
            source = Matrix(row[0], shape, (row[3], row[4]), size)
            yield i, source, (row[6], row[7]), Matrix(row[8], shape, (row[9], row[10]), size)


def run(kernel: str, table: npt.NDArray[np.int64], size: int, sums: npt.NDArray[np.int64] | None) -> None:
    """Do what the launch does. sums: of ``sum_slices``."""
    for i, source, start, target in slices_of(table, size):
        if kernel == "copy_slices":
            target.values()[:] = source.values()
        else:
            assert kernel == "sum_slices"
            assert sums is not None
            bits = torch.from_numpy(source.values().astype(f"i{size}" if size > 1 else "u1"))
            with np.errstate(over="ignore"):
                sums[i] += np.uint64(checksum(bits, start)).astype(np.int64)

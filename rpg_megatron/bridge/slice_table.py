"""Many slices of GPU memory as a table, for one kernel that sums or copies all of them (``slice_kernels``).

A sync sums and copies the same slices every time. With torch's own operations a slice takes about eleven
calls of the host, some microseconds each: for thousands of slices seconds, whatever their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rpg_megatron.bridge.checksum import MODULUS, as_matrix, checksum

FIELDS = 11
"""Numbers in a row of the table: address, rows, columns, strides of both, first tile, index of the first row
and of the first column in the full tensor, then address and strides of the target of a copy. Strides and
indices count elements."""
ROWS, COLUMNS = 64, 256
"""Size of a tile, in elements."""
STEP = 8
"""Rows of a tile that are in registers at the same time."""

_LAUNCHING = threading.Lock()
"""Links have threads of their own, and Triton compiles a kernel at its first launch."""

Slice = tuple[torch.Tensor, Sequence[int]]
"""Values, and the index of their first element in the full tensor; as ``checksum`` takes them."""


class SliceTable:
    """Slices on one GPU, which must stay where they are while the table is used."""

    def __init__(self, slices: Sequence[Slice], targets: Sequence[torch.Tensor] | None = None):
        """targets: where ``copy`` writes each slice to: the same shape and dtype."""
        self._slices = len(slices)
        rows: dict[int, list[tuple[int, ...]]] = {}
        where: dict[int, list[int]] = {}
        for i, (values, start) in enumerate(slices):
            target = values if targets is None else targets[i]
            if (target.shape, target.dtype) != (values.shape, values.dtype):
                raise ValueError(
                    f"slice {i}: {values.dtype} {values.shape}, its target {target.dtype} {target.shape}"
                )
            if values.numel():
                size, row = _row(values, start, target)
                rows.setdefault(size, []).append(row)
                where.setdefault(size, []).append(i)
        self._parts = [_Part(size, rows[size], where[size], slices[0][0].device) for size in sorted(rows)]
        self._device = slices[0][0].device if slices else torch.device("cpu")

    @property
    def launches(self) -> int:
        """Number of launches of ``sums`` or ``copy``: one for each size of elements."""
        return len(self._parts)

    def sums(self) -> torch.Tensor:
        """Checksum of each slice, int64 [slices] on the GPU, in two's complement. The host does not wait."""
        out = torch.zeros(self._slices, dtype=torch.int64, device=self._device)
        for part in self._parts:
            launch("sum_slices", len(part.tiles), part.table, part.tiles, out, size=part.size)
        return out

    def copy(self) -> None:
        """Copy every slice to its target, on the current stream."""
        for part in self._parts:
            launch("copy_slices", len(part.tiles), part.table, part.tiles, size=part.size)


class HostSlices:
    """The same for slices in host memory, which are summed and copied one by one."""

    def __init__(
        self, slices: Sequence[Slice], targets: Sequence[torch.Tensor], on_slice: Callable[[], None]
    ):
        self._slices, self._targets, self._on_slice = slices, targets, on_slice

    def sums(self) -> torch.Tensor:
        """As ``SliceTable.sums``, in host memory."""
        sums = np.zeros(len(self._slices), np.uint64)
        for i, (values, start) in enumerate(self._slices):
            self._on_slice()
            sums[i] = checksum(values, start)
        return torch.from_numpy(sums.view(np.int64))

    def copy(self) -> None:
        """Copy every slice to its target, of any dtype and on any device."""
        for (values, _), target in zip(self._slices, self._targets, strict=True):
            self._on_slice()
            target.copy_(values)


def table_of(
    slices: Sequence[Slice],
    targets: Sequence[torch.Tensor] = (),
    on_slice: Callable[[], None] = lambda: None,
) -> SliceTable | HostSlices:
    """What sums slices and copies them to ``targets``. on_slice: called for each slice in host memory."""
    if slices and slices[0][0].device.type == "cuda":
        return SliceTable(slices, targets or None)
    return HostSlices(slices, targets, on_slice)


class TableCache[T]:
    """What was made from addresses in the last sync, as long as it holds."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._made: list[T] = []

    def get(self, key: Hashable, memory: Iterable[torch.Tensor], make: Callable[[], T]) -> T:
        """What ``make`` returned, called again if the key has changed or if any of ``memory`` has moved."""
        key = key, tuple(tensor.data_ptr() for tensor in memory)
        if not self._made or key != self._key:
            self._made.clear()  # not both at once
            self._made.append(make())
            self._key = key
        return self._made[0]


def launch(kernel: str, number: int, *arguments: Any, size: int) -> None:
    """Launch a kernel of ``slice_kernels`` for that many tiles. size: bytes of an element."""
    from rpg_megatron.bridge import slice_kernels  # imports Triton, which a CPU does not need

    with _LAUNCHING:
        getattr(slice_kernels, kernel)[(number,)](
            *arguments, SIZE=size, ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP
        )


class _Part:
    """The slices whose elements have one size, in bytes."""

    def __init__(self, size: int, rows: list[tuple[int, ...]], where: list[int], device: torch.device):
        """where: index of each row's slice among all slices."""
        self.size = size
        table = np.array(rows, np.int64)
        tiles = -(-table[:, 1] // ROWS) * -(-table[:, 2] // COLUMNS)
        table[:, 5] = np.cumsum(tiles) - tiles
        whole = np.zeros((max(where) + 1, FIELDS), np.int64)  # by the slice's index, as the sums are
        whole[where] = table
        self.table = _to_device(whole, device)
        """int64 [slices, FIELDS]."""
        self.tiles = _to_device(np.repeat(np.array(where, np.int32), tiles), device)
        """int32 [tiles]: the slice of each tile."""


def checksums(slices: Iterable[Slice]) -> list[int]:
    """``checksum`` of each slice, all on one device. The host waits once for all slices on a GPU."""
    # One after the other: a slice may be a copy that is made when it is asked for.
    sums = [table_of([x]).sums() for x in slices]
    return modulo(torch.cat(sums)) if sums else []


def modulo(sums: torch.Tensor) -> list[int]:
    """``SliceTable.sums`` as checksums of this process; the host waits for them."""
    return [number % MODULUS for number in sums.tolist()]


def _row(values: torch.Tensor, start: Sequence[int], target: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Size of the elements, 8 bytes wherever slices are of whole words, and the table's row."""
    matrix, (first_row, first_column) = as_matrix(values, start)
    into, _ = as_matrix(target, start)
    size, (rows, columns) = matrix.element_size(), matrix.shape
    strides, target_strides = matrix.stride(), into.stride()
    per_word = 8 // size
    ends = (columns, first_column, *(x.stride(0) if rows > 1 else 0 for x in (matrix, into)))
    if (
        all(x.stride(1) == 1 and x.data_ptr() % 8 == 0 for x in (matrix, into))
        and not any(n % per_word for n in ends)
        and size < 8
    ):
        size, columns, first_column = 8, columns // per_word, first_column // per_word
        strides, target_strides = (strides[0] // per_word, 1), (target_strides[0] // per_word, 1)
    place = into.data_ptr(), *target_strides
    return size, (matrix.data_ptr(), rows, columns, *strides, 0, first_row, first_column, *place)


def _to_device(values: npt.NDArray[np.int32 | np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    # From pinned memory: otherwise the host would wait for all queued work.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

"""Many slices of GPU memory as a table for the kernels of ``slice_kernels``: their checksums, or copies of them.

A sync moves and sums the same slices every time. Per slice, torch needs about eleven calls from the host, 5 to 10 us
each; a table needs one launch for all slices, and is built again only if memory has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rpg_megatron.bridge.checksum import MODULUS, as_matrix
from rpg_megatron.bridge.slice_kernels import COLUMNS, FIELDS, ROWS, copy_slices, launch, sum_slices

Slice = tuple[torch.Tensor, Sequence[int]]
"""Values on a GPU, and the index of their first element in the full tensor; as ``checksum`` takes them."""


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
                raise ValueError(f"slice {i}: {values.dtype} {values.shape}, its target {target.dtype} {target.shape}")
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
            launch(sum_slices, len(part.tiles), part.table, part.tiles, out, size=part.size)
        return out

    def copy(self) -> None:
        """Copy every slice to its target, on the current stream."""
        for part in self._parts:
            launch(copy_slices, len(part.tiles), part.table, part.tiles, size=part.size)


class TableCache:
    """The table of the last sync, as long as it is the one that is needed."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._table: SliceTable | None = None

    def get(self, key: Hashable, memory: Iterable[torch.Tensor], make: Callable[[], SliceTable]) -> SliceTable:
        """The table for ``key``, made anew if the key has changed or if any of ``memory`` has moved."""
        key = key, tuple(tensor.data_ptr() for tensor in memory)
        if self._table is None or key != self._key:
            self._key, self._table = None, None  # not both tables at once
            self._key, self._table = key, make()
        return self._table


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


def modulo(sums: torch.Tensor) -> list[int]:
    """``SliceTable.sums`` as checksums of this process; the host waits for them."""
    return [number % MODULUS for number in sums.tolist()]


def _row(values: torch.Tensor, start: Sequence[int], target: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Size of the elements and the table's row. Whole words count as elements of 8 bytes wherever possible."""
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

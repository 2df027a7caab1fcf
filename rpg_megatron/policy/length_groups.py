"""Sequences of a packed row grouped by length, so that similar ones share an attention call on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_PADDING = 4 / 3
"""Maximum ratio of padded to real tokens in a group of sequences that share one attention call: for short
sequences a call costs more than the padding.
"""
_MAX_LENGTH_GAP = 64
"""Maximum difference of the lengths in a group, in tokens, since the cost of attention is quadratic."""


@dataclass(frozen=True)
class LengthGroups:
    """Sequences of a row, grouped by length; each group is padded to its longest sequence."""

    shapes: list[tuple[int, int]]
    """(sequences, length of the longest) of each group."""
    padded: Tensor | None
    """int64 [n]: for each position of all groups, sequences x longest each, its position in the row. Padding
    repeats a sequence's last position. None: the groups are the row's sequences, one by one.
    """
    restored: Tensor | None
    """int64 [t]: for each position of the row, its index in ``padded``."""


def group_by_length(lengths: Sequence[int], device: torch.device) -> LengthGroups:
    """Group sequences of a row by length, shortest first; see ``_MAX_PADDING`` and ``_MAX_LENGTH_GAP``."""
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    members: list[list[int]] = []
    total = 0
    for i in np.argsort(sizes, kind="stable").tolist():
        n = lengths[i]
        group = members[-1] if members else []
        if (
            group
            and n - lengths[group[0]] <= _MAX_LENGTH_GAP
            and n * (len(group) + 1) <= _MAX_PADDING * (total + n)
        ):
            group.append(i)
            total += n
        else:
            members.append([i])
            total = n
    if all(len(m) == 1 for m in members):
        return LengthGroups([(1, n) for n in lengths], None, None)
    shapes, padded, restored, offset = [], [], np.empty(sizes.sum(), np.int64), 0
    for m in members:
        sizes_of_group = sizes[m, None]
        column = np.arange(sizes_of_group.max())
        rows = starts[m, None] + np.minimum(column, sizes_of_group - 1)
        real = column < sizes_of_group
        restored[rows[real]] = offset + np.flatnonzero(real)
        shapes.append(rows.shape)
        padded.append(rows.ravel())
        offset += rows.size
    return LengthGroups(shapes, copy_to(np.concatenate(padded), device), copy_to(restored, device))


def copy_to(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, to a GPU from pinned memory: otherwise the host would wait for all queued work."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

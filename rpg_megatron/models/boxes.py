"""Box arithmetic: which part of which Hugging Face tensor is where in which Megatron shard. No torch here.

Preflight, checkpoint conversion and weight sync share these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class MappingError(ValueError):
    """Shards and Hugging Face tensors do not match: wrong rank coordinates, or a bug in a mapping."""


@dataclass(frozen=True)
class Box:
    """A range per dimension: ``start[d] <= index[d] < start[d] + extent[d]``, counted in elements."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse boxes with unequal numbers of dimensions or negative values."""
        if len(self.start) != len(self.extent):
            raise ValueError(f"start and extent of a box must have equal length: {self.start}, {self.extent}")
        if any(s < 0 for s in self.start) or any(e < 0 for e in self.extent):
            raise ValueError(f"start and extent of a box must not be negative: {self.start}, {self.extent}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """First index past the box, per dimension."""
        return tuple(s + e for s, e in zip(self.start, self.extent, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.extent)

    def intersect(self, other: Box) -> Box | None:
        """The intersection, or None if it is empty."""
        if len(self.start) != len(other.start):
            raise ValueError(f"cannot intersect boxes of {len(self.start)} and {len(other.start)} dimensions")
        start = tuple(map(max, self.start, other.start))
        extent = tuple(min(a, b) - s for a, b, s in zip(self.end, other.end, start, strict=True))
        return Box(start, extent) if all(e > 0 for e in extent) else None

    def offset_in(self, outer: Box) -> tuple[int, ...]:
        """Start of this box relative to ``outer``. Raises ValueError if it is not inside."""
        inside = len(self.start) == len(outer.start) and all(
            a >= b and ae <= be
            for a, b, ae, be in zip(self.start, outer.start, self.end, outer.end, strict=True)
        )
        if not inside:
            raise ValueError(f"{self} is not inside {outer}")
        return tuple(a - b for a, b in zip(self.start, outer.start, strict=True))

    def slices(self, begin: tuple[int, ...] = ()) -> tuple[int | slice, ...]:
        """Index of this box in its tensor; with ``begin``, in one of which its tensor is a part that begins
        there, which may have more dimensions in front.
        """
        more = len(begin) - len(self.start) if begin else 0
        starts = map(sum, zip(self.start, begin[more:], strict=True)) if begin else self.start
        return *begin[:more], *(slice(s, s + e) for s, e in zip(starts, self.extent, strict=True))


@dataclass(frozen=True)
class Piece:
    """A slice of one Megatron parameter that equals a slice of one Hugging Face tensor.

    ``hf`` is the box in the HF tensor, ``local`` the box in this rank's parameter.
    """

    hf_name: str
    hf: Box
    local: Box

    def __post_init__(self) -> None:
        """Refuse boxes of different extents."""
        if self.hf.extent != self.local.extent:
            raise ValueError(
                f"{self.hf_name}: extents differ, HF {self.hf.extent} and local {self.local.extent}"
            )

    def cut(self, wanted: Box) -> Piece | None:
        """The part of this piece inside ``wanted``, a box of the HF tensor; None if there is none."""
        common = self.hf.intersect(wanted)
        if common is None:
            return None
        shift = common.offset_in(self.hf)
        start = tuple(a + b for a, b in zip(self.local.start, shift, strict=True))
        return Piece(self.hf_name, common, Box(start, common.extent))


def check_cover(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise MappingError unless ``boxes`` cover every element of the tensor exactly once."""
    full = Box.whole(shape)
    ordered = sorted(boxes, key=lambda b: b.start)
    for i, box in enumerate(ordered):
        try:
            box.offset_in(full)
        except ValueError:
            raise MappingError(f"{name}: {box} reaches outside the tensor's shape {tuple(shape)}") from None
        for later in ordered[i + 1 :]:
            if box.start and later.start[0] >= box.end[0]:
                break  # sorted by the first dimension: no later box can overlap this one
            if box.intersect(later) is not None:
                raise MappingError(f"{name}: {box} and {later} overlap; some elements have two owners")
    covered = sum(b.numel for b in ordered)
    if covered != full.numel:
        raise MappingError(f"{name}: {full.numel - covered} of {full.numel} elements are held by no rank")

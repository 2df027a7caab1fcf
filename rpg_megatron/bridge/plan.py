"""Arithmetic on boxes: which part of which Hugging Face tensor lies where in which Megatron shard.

No torch here. The preflight on a login node, the checkpoint code and the live bridge share these
functions, so a wrong partition is one bug with one error message, whatever was being moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpg_megatron.bridge.layouts import Layout
    from rpg_megatron.policy.model import Mesh


class LayoutError(ValueError):
    """Shards and Hugging Face tensors do not fit together: a wrong placement, or a bug in a layout."""


@dataclass(frozen=True)
class Box:
    """A range per dimension: ``start[d] <= index[d] < start[d] + extent[d]``, counted in elements."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse boxes of mixed rank and negative sizes, which later arithmetic would silently misread."""
        if len(self.start) != len(self.extent):
            raise ValueError(f"a box needs as many starts as extents: {self.start}, {self.extent}")
        if any(s < 0 for s in self.start) or any(e < 0 for e in self.extent):
            raise ValueError(f"a box has no negative numbers: {self.start}, {self.extent}")

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
        """The common part, or None if there is not a single common element."""
        if len(self.start) != len(other.start):
            raise ValueError(f"boxes of {len(self.start)} and {len(other.start)} dimensions do not meet")
        start = tuple(map(max, self.start, other.start))
        extent = tuple(min(a, b) - s for a, b, s in zip(self.end, other.end, start, strict=True))
        return Box(start, extent) if all(e > 0 for e in extent) else None

    def offset_in(self, outer: Box) -> tuple[int, ...]:
        """Where this box begins, from the start of ``outer``. ValueError if it is not inside."""
        inside = len(self.start) == len(outer.start) and all(
            a >= b and ae <= be
            for a, b, ae, be in zip(self.start, outer.start, self.end, outer.end, strict=True)
        )
        if not inside:
            raise ValueError(f"{self} does not lie inside {outer}")
        return tuple(a - b for a, b in zip(self.start, outer.start, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of a tensor."""
        return tuple(slice(s, s + e) for s, e in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True)
class Piece:
    """Part of one Megatron parameter that is part of one Hugging Face tensor, element by element.

    ``hf`` counts from the start of the HF tensor, ``local`` from the start of this rank's parameter.
    """

    hf_name: str
    hf: Box
    local: Box

    def __post_init__(self) -> None:
        """Both sides hold the same elements, so their extents are equal."""
        if self.hf.extent != self.local.extent:
            raise ValueError(
                f"{self.hf_name}: the two sides differ, {self.hf.extent} and {self.local.extent}"
            )

    def cut(self, wanted: Box) -> Piece | None:
        """The part of this piece whose HF side lies in ``wanted``, or None."""
        common = self.hf.intersect(wanted)
        if common is None:
            return None
        shift = common.offset_in(self.hf)
        start = tuple(a + b for a, b in zip(self.local.start, shift, strict=True))
        return Piece(self.hf_name, common, Box(start, common.extent))


@dataclass(frozen=True)
class Placement:
    """Where one training process stands in the parallel grid, as far as its weights depend on it."""

    rank: int
    """Rank in the (default) process group."""
    tensor: int
    """Tensor-parallel size."""
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    context_rank: int
    vocab_multiple: int
    """The vocabulary is padded so that each tensor rank holds a multiple of so many rows."""

    @classmethod
    def of(cls, mesh: Mesh, vocab_multiple: int) -> Placement:
        """That of this trainer rank."""
        return cls(
            rank=mesh.rank,
            tensor=mesh.tensor,
            tensor_rank=mesh.tensor_rank,
            pipeline_rank=mesh.pipeline_rank,
            data_rank=mesh.data_rank,
            context_rank=mesh.context_rank,
            vocab_multiple=vocab_multiple,
        )


@dataclass(frozen=True)
class Holding:
    """One process's placement and the names and shapes of its parameters: what ranks tell each other."""

    placement: Placement
    params: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Source:
    """One piece of an HF tensor and the one process that sends it."""

    rank: int
    param: str
    piece: Piece


def check_cover(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise LayoutError unless ``boxes`` hold every element of the tensor exactly once."""
    full = Box.whole(shape)
    ordered = sorted(boxes, key=lambda b: b.start)
    for i, box in enumerate(ordered):
        try:
            box.offset_in(full)
        except ValueError:
            raise LayoutError(f"{name}: {box} reaches outside the tensor's shape {tuple(shape)}") from None
        for later in ordered[i + 1 :]:
            if box.start and later.start[0] >= box.end[0]:
                break  # sorted by the first dimension: nothing further on can overlap this one
            if box.intersect(later) is not None:
                raise LayoutError(f"{name}: {box} and {later} overlap; some elements have two owners")
    held = sum(b.numel for b in ordered)
    if held != full.numel:
        raise LayoutError(f"{name}: {full.numel - held} of {full.numel} elements are held by no rank")


def local_pieces(layout: Layout, placement: Placement, param: str, shape: Sequence[int]) -> list[Piece]:
    """``layout.pieces`` of one parameter, after checking that it has the shape the layout expects.

    Raises LayoutError that names the rank and the parameter.
    """
    p = placement
    expected = layout.local_shape(param, tensor=p.tensor, vocab_multiple=p.vocab_multiple)
    if tuple(shape) != expected:
        raise LayoutError(
            f"rank {p.rank}: {param} has shape {tuple(shape)}, {layout.shape.family} at tensor parallel size "
            f"{p.tensor} expects {expected}; model configuration and checkpoint disagree"
        )
    return layout.pieces(
        param,
        tensor=p.tensor,
        tensor_rank=p.tensor_rank,
        vocab_multiple=p.vocab_multiple,
    )


def assign_sources(layout: Layout, holdings: Iterable[Holding]) -> dict[str, list[Source]]:
    """For every HF tensor the pieces that make it up, each with one owner; in ``layout.hf_tensors()`` order.

    What several ranks hold alike (norms under tensor parallelism, a tied output layer on the last stage,
    everything under data and context parallelism) is taken from the first of them, by stage, then tensor
    rank. The same holdings give every rank the same answer.
    Raises LayoutError if a tensor is incomplete, or a parameter has an unexpected name or shape.
    """
    sources: dict[str, dict[Box, Source]] = {name: {} for name in layout.hf_tensors()}
    first: dict[tuple[int, int], Holding] = {}
    for holding in sorted(holdings, key=lambda h: h.placement.rank):
        first.setdefault((holding.placement.pipeline_rank, holding.placement.tensor_rank), holding)
    for _, holding in sorted(first.items()):
        for param, shape in holding.params:
            for piece in local_pieces(layout, holding.placement, param, shape):
                if piece.hf_name not in sources:
                    raise LayoutError(
                        f"rank {holding.placement.rank}: {param} maps to {piece.hf_name}, which the model "
                        "does not have; are the layers numbered through the whole model?"
                    )
                sources[piece.hf_name].setdefault(piece.hf, Source(holding.placement.rank, param, piece))
    for name, shape in layout.hf_tensors().items():
        check_cover(name, shape, sources[name])
    return {name: sorted(found.values(), key=lambda s: s.piece.hf.start) for name, found in sources.items()}


def group_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Cut the tensors, in order, into files of at most ``max_bytes``; a larger tensor has its own."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups

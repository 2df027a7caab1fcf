"""A parameter of Megatron's as segments of Hugging Face tensors, and how ranks share it. No torch here.

From the segments follow the tensors of the checkpoint, the shape on each rank, and which slice of which
tensor a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.models.boxes import Box, Piece

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertShard:
    """The experts of a layer that a rank holds, and its part of each of them."""

    parallel: int = 1
    """Expert-parallel size."""
    rank: int = 0
    """Expert-parallel rank."""
    tensor: int = 1
    """Tensor-parallel size of each expert."""
    tensor_rank: int = 0


ALL_EXPERTS = ExpertShard()
"""The shard of each rank without expert parallelism; also used for dense models."""


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's position in the parallel layout, as far as its weights depend on it; by default it has all."""

    rank: int = 0
    """Rank in the (default) process group."""
    tensor: int = 1
    """Tensor-parallel size."""
    tensor_rank: int = 0
    pipeline_rank: int = 0
    data_rank: int = 0
    context_rank: int = 0
    vocab_multiple: int = 1
    """The vocabulary is padded so that each tensor rank holds a multiple of this number of rows."""
    experts: ExpertShard = ALL_EXPERTS
    """Of no effect in dense models."""

    @property
    def shard(self) -> tuple[int, int, int, int]:
        """The same for two ranks if and only if they hold the same parameters with the same values."""
        return self.pipeline_rank, self.tensor_rank, self.experts.rank, self.experts.tensor_rank


ONE_RANK = RankCoordinates()


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a parameter that are rows of a Hugging Face tensor: consecutive, or in blocks."""

    name: str
    """Of the tensor, within its layer."""
    rows: int
    first: int = 0
    """The first of these rows in the tensor."""
    block: int = 0
    """Rows that are consecutive in the tensor; 0: all."""
    stride: int = 0
    """Rows of the tensor from the start of a block to the start of the next."""

    @property
    def end(self) -> int:
        """The row behind the last one in the tensor."""
        blocks = self.rows // self.block - 1 if self.block else 0
        return self.first + blocks * self.stride + (self.block or self.rows)

    def bands(self, begin: int, stop: int) -> Iterator[tuple[int, int]]:
        """First row in the tensor, and number, of the consecutive rows that make up [begin, stop) of this."""
        block = self.block or self.rows
        while begin < stop:
            number, row = divmod(begin, block)
            count = min(block - row, stop - begin)
            yield self.first + number * self.stride + row, count
            begin += count


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer: its segments in Megatron's order, and how tensor parallelism cuts it.

    cut: ``whole``, every rank has all of it; ``rows``, into equal blocks of rows, whatever the segments;
    ``segments``, each rank has an equal part of every segment; ``columns`` (of one segment).
    """

    segments: tuple[Segment, ...]
    columns: int | Shape | None = None
    """Size of a row, or its shape; None: a vector."""
    cut: Literal["whole", "rows", "segments", "columns"] = "whole"
    float32: bool = False
    """Whether the parameter, and its tensors in exports and engines, are float32 in models of any dtype."""

    def hf_tensors(self) -> dict[str, Shape]:
        """Name within the layer -> full shape of each HF tensor in the parameter."""
        rows: dict[str, int] = {}
        for s in self.segments:
            rows[s.name] = max(rows.get(s.name, 0), s.end)
        return {name: (count, *self._columns) for name, count in rows.items()}

    def local_shape(self, tensor: int) -> Shape:
        """Shape on each of ``tensor`` ranks."""
        rows = sum(s.rows for s in self.segments)
        if self.cut == "columns":
            assert isinstance(self.columns, int)
            return rows, self.columns // tensor
        return (rows if self.cut == "whole" else rows // tensor, *self._columns)

    def pieces(self, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """The pieces of one rank; ``layer`` is the prefix of HF names, such as ``model.layers.3.``."""
        local = self.local_shape(tensor)
        if self.cut == "columns":
            (segment,) = self.segments
            return [Piece(layer + segment.name, Box((0, tensor_rank * local[1]), local), Box.whole(local))]
        if self.cut == "whole":
            tensor, tensor_rank = 1, 0
        out, at, held = [], 0, 0  # at: row of the full parameter; held: rows of this rank so far
        for s in self.segments:
            if self.cut == "segments":
                begin, stop = tensor_rank * s.rows // tensor, (tensor_rank + 1) * s.rows // tensor
            else:
                begin = max(tensor_rank * local[0] - at, 0)
                stop = min((tensor_rank + 1) * local[0] - at, s.rows) if tensor > 1 else s.rows
            for first, count in s.bands(begin, stop):
                out.append(band(layer + s.name, first, held, (count, *self._columns)))
                held += count
            at += s.rows
        return out

    @property
    def _columns(self) -> Shape:
        if self.columns is None:
            return ()
        return (self.columns,) if isinstance(self.columns, int) else self.columns


def same(hf_name: str, shape: Shape) -> Piece:
    """The piece of a parameter that equals the HF tensor."""
    return Piece(hf_name, Box.whole(shape), Box.whole(shape))


def band(hf_name: str, hf_row: int, local_row: int, extent: Shape) -> Piece:
    """A piece of consecutive rows (of elements, if the tensor is a vector)."""
    rest = (0,) * (len(extent) - 1)
    return Piece(hf_name, Box((hf_row, *rest), extent), Box((local_row, *rest), extent))

"""Mappings of single parameters: how Megatron-Core shards a layer's parameters over tensor-parallel ranks.

Where Megatron-Core and Hugging Face differ:

- Megatron stores Q, K and V in one matrix, interleaved by query group: the rows of group g are its query
  heads, then its key head, then its value head. Tensor parallelism splits this into equal blocks of rows:
  between groups, or inside groups if there are more ranks than groups (Megatron then gathers the projections,
  and each rank selects its query heads and their group). The bias is split equally.
- Gate and up projection are one matrix; *each rank's* shard is its gate rows, then its up rows.
- The output projections are split by columns; norms and routers are replicated.
- Expert-parallel ranks hold equal numbers of consecutive experts. Each expert has its own parameters, which
  expert tensor parallelism splits like those of a feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rpg_megatron.config.model_shape import ModelShape
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


class ParameterMapping(Protocol):
    """The mapping of one parameter of a layer."""

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """Name within the layer -> full shape of each HF tensor in the parameter."""
        ...

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """Shape on each of ``tensor`` ranks."""
        ...

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """The pieces of one rank; ``layer`` is the prefix of HF names, such as ``model.layers.3.``."""
        ...


@dataclass(frozen=True)
class ReplicatedMapping:
    """A replicated vector of the hidden size or, with ``per_head``, of the head dimension."""

    name: str
    per_head: bool = False

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        return {self.name: self.local_shape(s, 1)}

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        return (s.head_dim if self.per_head else s.hidden_size,)

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        return [same(layer + self.name, self.local_shape(s, tensor))]


@dataclass(frozen=True)
class QKVMapping:
    """Query, key and value projections, interleaved by query group: their ``weight`` or their ``bias``."""

    what: str

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        return {
            f"self_attn.{name}.{self.what}": (s.num_kv_heads * rows, *self._columns(s))
            for name, rows in self._group(s)
        }

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        rows = s.num_kv_heads * sum(rows for _, rows in self._group(s))
        return (rows // tensor, *self._columns(s))

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        rank_rows = self.local_shape(s, tensor)[0]
        first, end = tensor_rank * rank_rows, (tensor_rank + 1) * rank_rows
        out, at = [], 0  # at: row of the full matrix
        for g in range(s.num_kv_heads):
            for name, rows in self._group(s):
                begin, stop = max(at, first), min(at + rows, end)
                if begin < stop:
                    hf_name = f"{layer}self_attn.{name}.{self.what}"
                    extent = (stop - begin, *self._columns(s))
                    out.append(band(hf_name, g * rows + begin - at, begin - first, extent))
                at += rows
        return out

    def _columns(self, s: ModelShape) -> Shape:
        return (s.hidden_size,) if self.what == "weight" else ()

    def _group(self, s: ModelShape) -> tuple[tuple[str, int], ...]:
        """One query group in Megatron's order: (HF projection, number of its rows in the group)."""
        queries = s.num_heads // s.num_kv_heads * s.head_dim
        return ("q_proj", queries), ("k_proj", s.head_dim), ("v_proj", s.head_dim)


@dataclass(frozen=True)
class GatedMLPMapping:
    """The two input projections of a gated feed-forward block, or of one expert."""

    expert: int | None = None

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        block, columns = _feed_forward(s, self.expert)
        return {f"{block}{name}.weight": (columns, s.hidden_size) for name in ("gate_proj", "up_proj")}

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        return (2 * (_feed_forward(s, self.expert)[1] // tensor), s.hidden_size)

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        rows = _feed_forward(s, self.expert)[1] // tensor
        return [
            band(layer + name, tensor_rank * rows, i * rows, (rows, s.hidden_size))
            for i, name in enumerate(self.hf_tensors(s))
        ]


@dataclass(frozen=True)
class RowParallelMapping:
    """An output projection, of attention or of the MLP, split by columns."""

    name: str

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        return {self.name: self.local_shape(s, 1)}

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        columns = s.ffn_hidden_size if self.name.startswith("mlp.") else s.num_heads * s.head_dim
        return (s.hidden_size, columns // tensor)

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        local = self.local_shape(s, tensor)
        return [Piece(layer + self.name, Box((0, tensor_rank * local[1]), local), Box.whole(local))]


@dataclass(frozen=True)
class ExpertOutputMapping:
    """The output projection of one expert, split by columns."""

    expert: int

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        return {f"{_feed_forward(s, self.expert)[0]}down_proj.weight": self.local_shape(s, 1)}

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        return (s.hidden_size, _feed_forward(s, self.expert)[1] // tensor)

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        local, (name,) = self.local_shape(s, tensor), self.hf_tensors(s)
        return [Piece(layer + name, Box((0, tensor_rank * local[1]), local), Box.whole(local))]


@dataclass(frozen=True)
class RouterMapping:
    """The router of a layer with experts, replicated."""

    def hf_tensors(self, s: ModelShape) -> dict[str, Shape]:
        """See ``ParameterMapping``."""
        return {"mlp.gate.weight": self.local_shape(s, 1)}

    def local_shape(self, s: ModelShape, tensor: int) -> Shape:
        """See ``ParameterMapping``."""
        assert s.experts is not None
        return (s.experts.count, s.hidden_size)

    def pieces(self, s: ModelShape, layer: str, tensor: int, tensor_rank: int) -> list[Piece]:
        """See ``ParameterMapping``."""
        return [same(f"{layer}mlp.gate.weight", self.local_shape(s, tensor))]


def _feed_forward(s: ModelShape, expert: int | None) -> tuple[str, int]:
    """HF prefix within the layer and columns of the layer's feed-forward block, or of one of its experts."""
    if expert is None:
        return "mlp.", s.ffn_hidden_size
    assert s.experts is not None
    return f"mlp.experts.{expert}.", s.experts.ffn_hidden_size


def same(hf_name: str, shape: Shape) -> Piece:
    """The piece of a parameter that equals the HF tensor."""
    return Piece(hf_name, Box.whole(shape), Box.whole(shape))


def band(hf_name: str, hf_row: int, local_row: int, extent: Shape) -> Piece:
    """A piece of consecutive rows (of elements, if the tensor is a vector)."""
    rest = (0,) * (len(extent) - 1)
    return Piece(hf_name, Box((hf_row, *rest), extent), Box((local_row, *rest), extent))

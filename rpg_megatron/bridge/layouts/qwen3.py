"""Qwen3 (dense): HF tensors against Megatron-Core's GPTModel.

Where the two differ:

- Megatron stores Q, K and V in one matrix, interleaved by query group: the rows of group g are its query
  heads, then its key head, then its value head. Tensor parallelism cuts between groups.
- gate and up are one matrix; *each rank's* shard is its gate rows, then its up rows.
- Vocabulary rows are padded to a multiple; padding rows have no counterpart in the checkpoint.
- With tied embeddings the last pipeline stage has an ``output_layer.weight`` of its own: a copy of the
  embedding.
- Transformer Engine fuses the norms before QKV and fc1 into those layers, under names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rpg_megatron.bridge.plan import Box, LayoutError, Piece
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import ModelShape

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
"""Per layer, Megatron name -> HF name, for vectors that every tensor rank holds whole."""

LOCAL_SPEC = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
"""A layer's parameters under Megatron's local spec (separate norms)."""


@dataclass(frozen=True)
class Qwen3Layout:
    """The box table of one dense Qwen3 model; see ``Layout`` for the contract."""

    shape: ModelShape

    def __post_init__(self) -> None:
        """Refuse the one variant that this table does not describe."""
        if self.shape.qkv_bias:
            raise UserError(
                "Qwen3 with attention_bias=true has no layout: released models have no such biases"
            )

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and full shape of every tensor of the HF checkpoint, in checkpoint order."""
        s = self.shape
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab_size, s.hidden_size)}
        for i in range(s.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (s.hidden_size,),
                "self_attn.q_proj.weight": (q, s.hidden_size),
                "self_attn.k_proj.weight": (kv, s.hidden_size),
                "self_attn.v_proj.weight": (kv, s.hidden_size),
                "self_attn.o_proj.weight": (s.hidden_size, q),
                "self_attn.q_norm.weight": (s.head_dim,),
                "self_attn.k_norm.weight": (s.head_dim,),
                "post_attention_layernorm.weight": (s.hidden_size,),
                "mlp.gate_proj.weight": (s.ffn_hidden_size, s.hidden_size),
                "mlp.up_proj.weight": (s.ffn_hidden_size, s.hidden_size),
                "mlp.down_proj.weight": (s.hidden_size, s.ffn_hidden_size),
            }
            out.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
        out["model.norm.weight"] = (s.hidden_size,)
        if not s.tied_embeddings:
            out["lm_head.weight"] = (s.vocab_size, s.hidden_size)
        return out

    def stage_params(
        self, *, layers: int, first: bool, last: bool, tensor: int, vocab_multiple: int
    ) -> dict[str, tuple[int, ...]]:
        """Names and local shapes of a pipeline stage's parameters (Megatron's local layer spec)."""
        names = ["embedding.word_embeddings.weight"] if first else []
        names += [f"decoder.layers.{i}.{rest}" for i in range(layers) for rest in LOCAL_SPEC]
        if last:
            names.append("decoder.final_layernorm.weight")
            # With one stage, a tied output layer reads the embedding's parameter and has none of its own.
            if not (first and self.shape.tied_embeddings):
                names.append("output_layer.weight")
        return {n: self.local_shape(n, tensor=tensor, vocab_multiple=vocab_multiple) for n in names}

    def local_shape(self, param_name: str, *, tensor: int, vocab_multiple: int) -> tuple[int, ...]:
        """Shape of one parameter on one rank. LayoutError if the name is unknown."""
        s = self.shape
        if param_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return (s.padded_vocab(tensor, vocab_multiple) // tensor, s.hidden_size)
        if param_name == "decoder.final_layernorm.weight":
            return (s.hidden_size,)
        _, rest = self._split(param_name)
        groups = s.num_kv_heads // tensor
        ffn = s.ffn_hidden_size // tensor
        if rest in REPLICATED:
            per_head = REPLICATED[rest].startswith("self_attn.")
            return (s.head_dim if per_head else s.hidden_size,)
        if rest == "self_attention.linear_qkv.weight":
            return (groups * self._group_rows, s.hidden_size)
        if rest == "self_attention.linear_proj.weight":
            return (s.hidden_size, s.num_heads // tensor * s.head_dim)
        if rest == "mlp.linear_fc1.weight":
            return (2 * ffn, s.hidden_size)
        return (s.hidden_size, ffn)

    def pieces(
        self, param_name: str, *, tensor: int, tensor_rank: int, layer_offset: int, vocab_multiple: int
    ) -> list[Piece]:
        """The parts of one local parameter and where they lie in HF tensors; padding rows have none."""
        s = self.shape
        local = self.local_shape(param_name, tensor=tensor, vocab_multiple=vocab_multiple)
        if param_name == "embedding.word_embeddings.weight":
            return self._vocabulary("model.embed_tokens.weight", local, tensor_rank)
        if param_name == "output_layer.weight":
            name = "model.embed_tokens.weight" if s.tied_embeddings else "lm_head.weight"
            return self._vocabulary(name, local, tensor_rank)
        if param_name == "decoder.final_layernorm.weight":
            return [_same("model.norm.weight", local)]
        index, rest = self._split(param_name)
        layer = f"model.layers.{index + layer_offset}."
        if rest in REPLICATED:
            return [_same(layer + REPLICATED[rest], local)]
        if rest == "self_attention.linear_qkv.weight":
            return self._qkv(layer + "self_attn.", tensor, tensor_rank)
        if rest == "mlp.linear_fc1.weight":
            rows = local[0] // 2
            return [
                _rows(layer + f"mlp.{name}.weight", tensor_rank * rows, i * rows, rows, s.hidden_size)
                for i, name in enumerate(("gate_proj", "up_proj"))
            ]
        name = "self_attn.o_proj" if rest == "self_attention.linear_proj.weight" else "mlp.down_proj"
        columns = Box((0, tensor_rank * local[1]), local)
        return [Piece(f"{layer}{name}.weight", columns, Box.whole(local))]

    @property
    def _group_rows(self) -> int:
        """Rows of one query group in Megatron's QKV matrix: its query heads, one key head, one value head."""
        return (self.shape.num_heads // self.shape.num_kv_heads + 2) * self.shape.head_dim

    def _split(self, param_name: str) -> tuple[int, str]:
        match = LAYER.fullmatch(param_name)
        if match is None or (match[2] not in REPLICATED and match[2] not in LOCAL_SPEC):
            raise LayoutError(
                f"{param_name}: the {self.shape.family} layout knows no such parameter of a GPTModel"
            )
        return int(match[1]), match[2]

    def _vocabulary(self, name: str, local: Sequence[int], tensor_rank: int) -> list[Piece]:
        first = tensor_rank * local[0]
        rows = min(local[0], self.shape.vocab_size - first)
        return [_rows(name, first, 0, rows, self.shape.hidden_size)] if rows > 0 else []

    def _qkv(self, prefix: str, tensor: int, tensor_rank: int) -> list[Piece]:
        s = self.shape
        groups = s.num_kv_heads // tensor
        query_rows = s.num_heads // s.num_kv_heads * s.head_dim
        out = []
        for g in range(groups):
            at = g * self._group_rows
            for name, rows in (("q_proj", query_rows), ("k_proj", s.head_dim), ("v_proj", s.head_dim)):
                first = (tensor_rank * groups + g) * rows
                out.append(_rows(f"{prefix}{name}.weight", first, at, rows, s.hidden_size))
                at += rows
        return out


def _same(hf_name: str, shape: Sequence[int]) -> Piece:
    """A parameter that is the HF tensor."""
    return Piece(hf_name, Box.whole(shape), Box.whole(shape))


def _rows(hf_name: str, hf_row: int, local_row: int, rows: int, columns: int) -> Piece:
    """A band of whole rows."""
    return Piece(hf_name, Box((hf_row, 0), (rows, columns)), Box((local_row, 0), (rows, columns)))

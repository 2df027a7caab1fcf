"""Mapping between Hugging Face tensors and Megatron-Core's GPTModel, shared by dense Llama-like decoders.

The file of a family adds the parameters that only its layers have. Outside the layers:

- Vocabulary rows are padded to a multiple; padding rows have no counterpart in the checkpoint.
- With tied embeddings, the last pipeline stage has its own ``output_layer.weight``, a copy of the embedding.
- Transformer Engine fuses the norms before QKV and fc1 into those layers, under other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import MappingError, Piece
from rpg_megatron.models.partition import (
    ALL_EXPERTS,
    ExpertShard,
    GatedMLPMapping,
    ParameterMapping,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
    Shape,
    band,
    same,
)

DENSE_LAYER: Mapping[str, ParameterMapping] = {
    "input_layernorm.weight": ReplicatedMapping("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": QKVMapping("weight"),
    "self_attention.linear_proj.weight": RowParallelMapping("self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": ReplicatedMapping("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": GatedMLPMapping(),
    "mlp.linear_fc2.weight": RowParallelMapping("mlp.down_proj.weight"),
}
"""Parameters of a layer in every family, by their names in Megatron's local spec (separate norms)."""

FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's name -> the local spec's."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class DenseMapping:
    """``ModelMapping`` of a dense decoder."""

    shape: ModelShape
    layer: Mapping[str, ParameterMapping]
    """Megatron's name within a layer (local spec) -> mapping of the parameter."""

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and full shape of every tensor of the HF checkpoint, layer by layer."""
        s = self.shape
        out: dict[str, Shape] = {"model.embed_tokens.weight": (s.vocab_size, s.hidden_size)}
        for i in range(s.num_layers):
            for part in self.layer.values():
                out.update({f"model.layers.{i}.{n}": shape for n, shape in part.hf_tensors(s).items()})
        out["model.norm.weight"] = (s.hidden_size,)
        if not s.tied_embeddings:
            out["lm_head.weight"] = (s.vocab_size, s.hidden_size)
        return out

    def stage_params(
        self,
        *,
        layers: Iterable[int],
        first: bool,
        last: bool,
        tensor: int,
        vocab_multiple: int,
        experts: ExpertShard = ALL_EXPERTS,
    ) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        names = ["embedding.word_embeddings.weight"] if first else []
        names += [f"decoder.layers.{i}.{rest}" for i in layers for rest in self.layer]
        if last:
            names.append("decoder.final_layernorm.weight")
            # With one stage, a tied output layer uses the embedding's parameter.
            if not (first and self.shape.tied_embeddings):
                names.append("output_layer.weight")
        return {n: self.local_shape(n, tensor=tensor, vocab_multiple=vocab_multiple) for n in names}

    def local_shape(
        self, param_name: str, *, tensor: int, vocab_multiple: int, experts: ExpertShard = ALL_EXPERTS
    ) -> Shape:
        """Shape of one parameter on one rank. MappingError if the name is unknown."""
        s = self.shape
        if param_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return (s.padded_vocab(tensor, vocab_multiple) // tensor, s.hidden_size)
        if param_name == "decoder.final_layernorm.weight":
            return (s.hidden_size,)
        return self._part(param_name)[1].local_shape(s, tensor)

    def pieces(
        self,
        param_name: str,
        *,
        tensor: int,
        tensor_rank: int,
        vocab_multiple: int,
        experts: ExpertShard = ALL_EXPERTS,
    ) -> list[Piece]:
        """The pieces of one local parameter; padding rows of the vocabulary have none."""
        s = self.shape
        if param_name == "decoder.final_layernorm.weight":
            return [same("model.norm.weight", (s.hidden_size,))]
        if param_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            own_head = param_name == "output_layer.weight" and not s.tied_embeddings
            step = s.padded_vocab(tensor, vocab_multiple) // tensor
            first = tensor_rank * step
            rows = min(step, s.vocab_size - first)
            name = "lm_head.weight" if own_head else "model.embed_tokens.weight"
            return [band(name, first, 0, (rows, s.hidden_size))] if rows > 0 else []
        index, part = self._part(param_name)
        return part.pieces(s, f"model.layers.{index}.", tensor, tensor_rank)

    def _part(self, param_name: str) -> tuple[int, ParameterMapping]:
        """Index of the layer, and the mapping of the parameter."""
        match = _LAYER.fullmatch(param_name)
        part = match and self.layer.get(FUSED.get(match[2], match[2]))
        if not match or part is None:
            raise MappingError(
                f"{param_name}: the {self.shape.family} mapping has no such parameter of a GPTModel"
            )
        return int(match[1]), part

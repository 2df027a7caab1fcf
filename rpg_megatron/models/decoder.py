"""Mapping between Hugging Face tensors and Megatron-Core's GPTModel, for every family.

``layer.py`` has the parameters of a layer. Outside the layers:

- Vocabulary rows are padded to a multiple; padding rows have no counterpart in the checkpoint.
- With tied embeddings, the last pipeline stage has its own ``output_layer.weight``, a copy of the embedding.
- Megatron numbers the experts of a rank from 0; in Transformer Engine's grouped layers they have other names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import MappingError, Piece
from rpg_megatron.models.layer import EXPERT, FUSED, layer_parameters, stored_parts
from rpg_megatron.models.partition import (
    ALL_EXPERTS,
    ExpertShard,
    Parameter,
    RankCoordinates,
    Shape,
    band,
    same,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(rf"{re.escape(EXPERT)}(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc1|linear_fc2)\.weight(\d+)")
_EMBEDDING, _HEAD, _NORM = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)


@dataclass(frozen=True)
class DecoderMapping:
    """``ModelMapping`` of a decoder."""

    shape: ModelShape

    @cached_property
    def parameters(self) -> int:
        """See ``ModelMapping``."""
        return sum(map(math.prod, self._hf_tensors.values()))

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and full shape of every tensor of the HF checkpoint, layer by layer."""
        return dict(self._hf_tensors)

    @cached_property
    def _hf_tensors(self) -> dict[str, Shape]:
        s = self.shape
        out: dict[str, Shape] = {f"{s.prefix}embed_tokens.weight": (s.vocab_size, s.hidden_size)}
        for i in range(s.num_layers):
            for parameter in layer_parameters(s, i).values():
                out |= {f"{s.prefix}layers.{i}.{n}": shape for n, shape in parameter.hf_tensors().items()}
        out[f"{s.prefix}norm.weight"] = (s.hidden_size,)
        if not s.tied_embeddings:
            out["lm_head.weight"] = (s.vocab_size, s.hidden_size)
        return out

    def stage_params(
        self, at: RankCoordinates, *, layers: Iterable[int], first: bool, last: bool
    ) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        names = [_EMBEDDING] * first
        for i in layers:
            for name in layer_parameters(self.shape, i):
                number = match[1] if (match := _LOCAL_EXPERT.fullmatch(name)) else 0
                if int(number) < self._experts(at.experts):
                    names.append(f"decoder.layers.{i}.{name}")
        # A stage with both ends has one tied weight.
        names += [_NORM] * last + [_HEAD] * (last and not (first and self.shape.tied_embeddings))
        return {name: self.local_shape(name, at) for name in names}

    def local_shape(self, param_name: str, at: RankCoordinates) -> Shape:
        """See ``ModelMapping``."""
        s = self.shape
        if param_name in (_EMBEDDING, _HEAD):
            return (s.padded_vocab(at.tensor, at.vocab_multiple) // at.tensor, s.hidden_size)
        if param_name == _NORM:
            return (s.hidden_size,)
        _, parameter, of_expert = self._find(param_name, at.experts)
        return parameter.local_shape(at.experts.tensor if of_expert else at.tensor)

    def pieces(self, param_name: str, at: RankCoordinates) -> list[Piece]:
        """See ``ModelMapping``."""
        s = self.shape
        if param_name == _NORM:
            return [same(f"{s.prefix}norm.weight", (s.hidden_size,))]
        if param_name in (_EMBEDDING, _HEAD):
            own_head = param_name == _HEAD and not s.tied_embeddings
            step, _ = self.local_shape(param_name, at)
            first = at.tensor_rank * step
            rows = min(step, s.vocab_size - first)
            name = "lm_head.weight" if own_head else f"{s.prefix}embed_tokens.weight"
            return [band(name, first, 0, (rows, s.hidden_size))] if rows > 0 else []
        layer, parameter, of_expert = self._find(param_name, at.experts)
        cut = at.experts if of_expert else at
        return parameter.pieces(f"{s.prefix}layers.{layer}.", cut.tensor, cut.tensor_rank)

    def stored_parts(self, param_name: str) -> list[str]:
        """See ``ModelMapping``."""
        if param_name in (_EMBEDDING, _HEAD, _NORM):
            return [param_name]
        _, parameter, _ = self._find(param_name, ALL_EXPERTS)
        return list(stored_parts(param_name, parameter))

    @cached_property
    def float32(self) -> frozenset[str]:
        """See ``ModelMapping``."""
        s = self.shape
        return frozenset(
            f"{s.prefix}layers.{i}.{name}"
            for i in range(s.num_layers)
            for parameter in layer_parameters(s, i).values()
            if parameter.float32
            for name in parameter.hf_tensors()
        )

    def _experts(self, shard: ExpertShard) -> int:
        """Experts of a layer on a rank; 1 for dense models."""
        return self.shape.experts.count // shard.parallel if self.shape.experts else 1

    def _find(self, param_name: str, experts: ExpertShard) -> tuple[int, Parameter, bool]:
        """Layer and parameter of a name, and whether it is an expert's."""
        match, known = _LAYER.fullmatch(param_name), dict[str, Parameter]()
        layer, name = (int(match[1]), FUSED.get(match[2], match[2])) if match else (-1, param_name)
        if 0 <= layer < self.shape.num_layers:
            known = layer_parameters(self.shape, layer)
        if grouped := _GROUPED_EXPERT.fullmatch(name):
            name = f"{EXPERT}{grouped[2]}.{grouped[1]}.weight"
        expert = _LOCAL_EXPERT.fullmatch(name)
        if expert and self.shape.has_experts(layer):
            share = self._experts(experts)
            if int(expert[1]) >= share:
                raise MappingError(
                    f"{param_name}: an expert-parallel rank holds {share} of the "
                    f"{share * experts.parallel} experts, numbered from 0"
                )
            name = f"{EXPERT}{experts.rank * share + int(expert[1])}.{expert[2]}"
        if name not in known and (whole := name.rpartition(".")[0]) in known:
            known = stored_parts(whole, known[whole])
        if name not in known:
            what = "such parameter of a GPTModel"
            if layer >= self.shape.num_layers:
                what = f"layer {layer}; are the layers numbered through the whole model?"
            elif self.shape.has_experts(layer) and name.startswith("mlp."):
                what = f"such parameter: layer {layer} of this {self.shape.family} model has experts"
            raise MappingError(f"{param_name}: the {self.shape.family} mapping has no {what}")
        return layer, known[name], expert is not None

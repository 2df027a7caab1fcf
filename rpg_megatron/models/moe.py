"""Mapping between Hugging Face tensors and Megatron-Core's GPTModel for mixture-of-experts decoders.

Only the feed-forward blocks differ from a dense decoder. In Hugging Face files each expert has its own
tensors. Megatron numbers the experts of a rank from 0; in Transformer Engine's grouped layers they have
other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import MappingError, Piece
from rpg_megatron.models.dense import DenseMapping
from rpg_megatron.models.partition import (
    ALL_EXPERTS,
    ExpertOutputMapping,
    ExpertShard,
    GatedMLPMapping,
    ParameterMapping,
    RouterMapping,
    Shape,
)

_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.mlp\.(.+)")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)\.weight")
_GROUPED_EXPERT = re.compile(r"experts\.(linear_fc1|linear_fc2)\.weight(\d+)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.mlp\.")
_ROUTER = RouterMapping()


@dataclass(frozen=True)
class MoEMapping:
    """``ModelMapping`` of a decoder with experts in some or all layers."""

    dense: DenseMapping
    """The same model with a dense feed-forward block in every layer."""

    @property
    def shape(self) -> ModelShape:
        """See ``ModelMapping``."""
        return self.dense.shape

    def hf_tensors(self) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        return dict(self._hf_tensors)

    @cached_property
    def _hf_tensors(self) -> dict[str, Shape]:
        out: dict[str, Shape] = {}
        for name, shape in self.dense.hf_tensors().items():
            match = _HF_BLOCK.match(name)
            if not match or not self._has_experts(int(match[1])):
                out[name] = shape
            elif match[0] + "gate.weight" not in out:  # once for the layer, in place of its dense block
                out |= {
                    f"model.layers.{match[1]}.{n}": size
                    for part in (_ROUTER, *self._expert_parts(range(self._count)))
                    for n, size in part.hf_tensors(self.shape).items()
                }
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
        out: dict[str, Shape] = {}
        names = self.dense.stage_params(
            layers=layers, first=first, last=last, tensor=tensor, vocab_multiple=vocab_multiple
        )
        for name, shape in names.items():
            match = _BLOCK.fullmatch(name)
            if not match or not self._has_experts(int(match[1])):
                out[name] = shape
            elif match[2] == "linear_fc1.weight":
                block = f"decoder.layers.{match[1]}.mlp."
                out[block + "router.weight"] = _ROUTER.local_shape(self.shape, tensor)
                for n in range(self._count // experts.parallel):
                    for which in ("linear_fc1", "linear_fc2"):
                        expert = f"{block}experts.local_experts.{n}.{which}.weight"
                        out[expert] = self._part(which, 0).local_shape(self.shape, experts.tensor)
        return out

    def local_shape(
        self, param_name: str, *, tensor: int, vocab_multiple: int, experts: ExpertShard = ALL_EXPERTS
    ) -> Shape:
        """See ``ModelMapping``."""
        match = self._find(param_name, experts)
        if match is None:
            return self.dense.local_shape(param_name, tensor=tensor, vocab_multiple=vocab_multiple)
        return match[1].local_shape(self.shape, experts.tensor)

    def pieces(
        self,
        param_name: str,
        *,
        tensor: int,
        tensor_rank: int,
        vocab_multiple: int,
        experts: ExpertShard = ALL_EXPERTS,
    ) -> list[Piece]:
        """See ``ModelMapping``."""
        match = self._find(param_name, experts)
        if match is None:
            return self.dense.pieces(
                param_name, tensor=tensor, tensor_rank=tensor_rank, vocab_multiple=vocab_multiple
            )
        layer, part = match
        return part.pieces(self.shape, f"model.layers.{layer}.", experts.tensor, experts.tensor_rank)

    def _find(self, param_name: str, experts: ExpertShard) -> tuple[int, ParameterMapping] | None:
        """Layer and mapping of a parameter of a router or an expert; None if the dense mapping has it."""
        match = _BLOCK.fullmatch(param_name)
        if not match or not self._has_experts(layer := int(match[1])):
            return None
        if match[2] == "router.weight":
            return layer, _ROUTER
        if local := _LOCAL_EXPERT.fullmatch(match[2]):
            number, which = int(local[1]), local[2]
        elif grouped := _GROUPED_EXPERT.fullmatch(match[2]):
            number, which = int(grouped[2]), grouped[1]
        else:
            raise MappingError(f"{param_name}: layer {layer} of this {self.shape.family} model has experts")
        share = self._count // experts.parallel
        if number >= share:
            raise MappingError(
                f"{param_name}: an expert-parallel rank holds {share} of the {self._count} experts, numbered "
                "from 0"
            )
        return layer, self._part(which, experts.rank * share + number)

    def _part(self, which: str, expert: int) -> ParameterMapping:
        return GatedMLPMapping(expert) if which == "linear_fc1" else ExpertOutputMapping(expert)

    def _expert_parts(self, experts: Iterable[int]) -> list[ParameterMapping]:
        return [self._part(which, e) for e in experts for which in ("linear_fc1", "linear_fc2")]

    @property
    def _count(self) -> int:
        assert self.shape.experts is not None
        return self.shape.experts.count

    def _has_experts(self, layer: int) -> bool:
        return layer in self._layers

    @cached_property
    def _layers(self) -> frozenset[int]:
        assert self.shape.experts is not None
        return frozenset(self.shape.experts.layers)

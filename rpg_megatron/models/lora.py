"""Mapping between PEFT's adapter tensors and the adapters beside Megatron's layers. No torch.

Each projection has an A [rank, inputs] and a B [outputs, rank]. Tensor parallelism cuts them as it cuts the
projection's weight: B by rows where that is column-parallel, A by columns where it is row-parallel. The other
one is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.lora import ATTENTION_TARGETS, LoraSettings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Box, MappingError, Piece
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ALL_EXPERTS, ExpertShard, Shape, same

ROW_PARALLEL = ("o_proj", "down_proj")
PACKED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections that are one layer in Megatron and one module in vLLM."""
_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(self_attention|mlp)\.lora\.(\w+)\.([AB])")
_BLOCKS = ("self_attention", "mlp")


def is_adapter(name: str) -> bool:
    """Whether this is Megatron's name of an adapter's parameter."""
    return ".lora." in name


def peft_name(layer: int, target: str, matrix: str) -> str:
    """Name of A or B in PEFT's file. layer: index from 0."""
    return f"base_model.model.{weight_name(layer, target).removesuffix('.weight')}.lora_{matrix}.weight"


def weight_name(layer: int, target: str) -> str:
    """HF name of the weight that an adapter belongs to."""
    block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
    return f"model.layers.{layer}.{block}.{target}.weight"


def projection_shape(s: ModelShape, target: str) -> Shape:
    """Outputs and inputs of a projection."""
    if target in ("q_proj", "o_proj"):
        shape = s.num_heads * s.head_dim, s.hidden_size
    elif target in ("k_proj", "v_proj"):
        shape = s.num_kv_heads * s.head_dim, s.hidden_size
    else:
        shape = s.ffn_hidden_size, s.hidden_size
    return shape[::-1] if target in ROW_PARALLEL else shape


@dataclass(frozen=True)
class AdapterMapping:
    """``ModelMapping`` of the adapters alone."""

    shape: ModelShape
    lora: LoraSettings

    @property
    def packed(self) -> list[tuple[str, ...]]:
        """Of ``PACKED`` those with an adapter."""
        return [names for names in PACKED if any(name in self.lora.names for name in names)]

    @property
    def parameters(self) -> int:
        """Number of parameters of all adapters."""
        return sum(rows * columns for rows, columns in self._hf_tensors.values())

    def hf_tensors(self) -> dict[str, Shape]:
        """Name in PEFT's file and full shape of every tensor, layer by layer."""
        return dict(self._hf_tensors)

    @cached_property
    def _hf_tensors(self) -> dict[str, Shape]:
        out: dict[str, Shape] = {}
        for layer in range(self.shape.num_layers):
            for target in self.lora.names:
                for matrix in "AB":
                    out[peft_name(layer, target, matrix)] = self._whole(target, matrix)
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
        return {
            f"decoder.layers.{layer}.{block}.lora.{target}.{matrix}": self._cut(target, matrix, tensor)
            for layer in layers
            for block in _BLOCKS
            for target in self.lora.names
            if (target in ATTENTION_TARGETS) == (block == "self_attention")
            for matrix in "AB"
        }

    def local_shape(
        self, param_name: str, *, tensor: int, vocab_multiple: int, experts: ExpertShard = ALL_EXPERTS
    ) -> Shape:
        """See ``ModelMapping``."""
        _, target, matrix = self._part(param_name)
        return self._cut(target, matrix, tensor)

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
        layer, target, matrix = self._part(param_name)
        name, local = peft_name(layer, target, matrix), self._cut(target, matrix, tensor)
        if local == self._whole(target, matrix):
            return [same(name, local)]
        start = (0, tensor_rank * local[1]) if matrix == "A" else (tensor_rank * local[0], 0)
        return [Piece(name, Box(start, local), Box.whole(local))]

    def _whole(self, target: str, matrix: str) -> Shape:
        outputs, inputs = projection_shape(self.shape, target)
        return (self.lora.rank, inputs) if matrix == "A" else (outputs, self.lora.rank)

    def _cut(self, target: str, matrix: str, tensor: int) -> Shape:
        rows, columns = self._whole(target, matrix)
        if (target in ROW_PARALLEL) != (matrix == "A"):
            return rows, columns
        return (rows, columns // tensor) if matrix == "A" else (rows // tensor, columns)

    def _part(self, param_name: str) -> tuple[int, str, str]:
        """Layer, projection, and A or B."""
        match = _PARAMETER.fullmatch(param_name)
        if not match or match[3] not in self.lora.names:
            raise MappingError(f"{param_name}: not a parameter of an adapter by the settings (lora)")
        return int(match[1]), match[3], match[4]


@dataclass(frozen=True)
class AdaptedMapping:
    """``ModelMapping`` of a model and its adapters."""

    model: ModelMapping
    adapters: AdapterMapping

    @property
    def shape(self) -> ModelShape:
        """See ``ModelMapping``."""
        return self.model.shape

    def hf_tensors(self) -> dict[str, Shape]:
        """See ``ModelMapping``; the adapters' come last."""
        return self.model.hf_tensors() | self.adapters.hf_tensors()

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
        layers = list(layers)
        for part in (self.model, self.adapters):
            out |= part.stage_params(
                layers=layers,
                first=first,
                last=last,
                tensor=tensor,
                vocab_multiple=vocab_multiple,
                experts=experts,
            )
        return out

    def local_shape(
        self, param_name: str, *, tensor: int, vocab_multiple: int, experts: ExpertShard = ALL_EXPERTS
    ) -> Shape:
        """See ``ModelMapping``."""
        part = self._of(param_name)
        return part.local_shape(param_name, tensor=tensor, vocab_multiple=vocab_multiple, experts=experts)

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
        return self._of(param_name).pieces(
            param_name,
            tensor=tensor,
            tensor_rank=tensor_rank,
            vocab_multiple=vocab_multiple,
            experts=experts,
        )

    def _of(self, param_name: str) -> ModelMapping:
        return self.adapters if is_adapter(param_name) else self.model


def with_adapters(mapping: ModelMapping, lora: LoraSettings | None) -> ModelMapping:
    """The mapping of a model and its adapters, if there are any."""
    return mapping if lora is None else AdaptedMapping(mapping, AdapterMapping(mapping.shape, lora))


def check_heads(shape: ModelShape, tensor: int, key: str) -> None:
    """Check that adapters can be cut. key: of the tensor-parallel size. Raises UserError."""
    if shape.num_kv_heads % tensor:
        raise UserError(
            f"lora needs {key} to divide the model's {shape.num_kv_heads} key/value heads, it is {tensor}; "
            "lower it"
        )


def split_parameters[T](params: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Parameters by Megatron's name: those of the model, and those of adapters."""
    model = {name: p for name, p in params.items() if not is_adapter(name)}
    return model, {name: p for name, p in params.items() if is_adapter(name)}

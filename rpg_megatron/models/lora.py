"""Mapping between PEFT's adapter tensors and the adapters beside Megatron's layers. No torch.

Each projection has an A [rank, inputs] and a B [outputs, rank]. Tensor parallelism cuts them as it cuts the
projection's weight: B by rows where that is column-parallel, A by columns where it is row-parallel. The other
one is whole on every rank. The output layer is column-parallel; its B is padded as its weight is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.lora import ATTENTION_TARGETS, OUTPUT_LAYER, PROJECTIONS, LoraSettings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Box, MappingError, Piece
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates, Shape, band, same

ROW_PARALLEL = ("o_proj", "down_proj")
PACKED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections that are one layer in Megatron and one module in vLLM."""
_PARAMETER = re.compile(
    r"(?:decoder\.layers\.(\d+)\.(?:self_attention|mlp)|output_layer)\.lora\.(\w+)\.([AB])"
)
_BLOCKS = ("self_attention", "mlp")


def is_adapter(name: str) -> bool:
    """Whether this is Megatron's name of an adapter's parameter."""
    return ".lora." in name


def peft_name(layer: int, target: str, matrix: str) -> str:
    """Name of A or B in PEFT's file. layer: index from 0; of no meaning for the output layer."""
    return f"base_model.model.{weight_name(layer, target).removesuffix('.weight')}.lora_{matrix}.weight"


def weight_name(layer: int, target: str) -> str:
    """HF name of the weight that an adapter belongs to. layer: see ``peft_name``."""
    if target == OUTPUT_LAYER:
        return f"{target}.weight"
    block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
    return f"model.layers.{layer}.{block}.{target}.weight"


def projection_shape(s: ModelShape, target: str) -> Shape:
    """Outputs and inputs of a projection, or of the output layer."""
    if target == OUTPUT_LAYER:
        return s.vocab_size, s.hidden_size
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
    def on_output_layer(self) -> bool:
        """Whether the output layer has an adapter."""
        return OUTPUT_LAYER in self.lora.names

    @property
    def parameters(self) -> int:
        """Number of parameters of all adapters."""
        return sum(rows * columns for rows, columns in self._hf_tensors.values())

    @property
    def float32(self) -> frozenset[str]:
        """See ``ModelMapping``."""
        return frozenset()

    def stored_parts(self, param_name: str) -> list[str]:
        """See ``ModelMapping``."""
        return [param_name]

    def hf_tensors(self) -> dict[str, Shape]:
        """Name in PEFT's file and full shape of every tensor, layer by layer."""
        return dict(self._hf_tensors)

    @cached_property
    def _hf_tensors(self) -> dict[str, Shape]:
        layers = range(self.shape.num_layers)
        places = [(n, target) for n in layers for target in self.lora.names if target in PROJECTIONS]
        places += [(0, OUTPUT_LAYER)] * self.on_output_layer
        return {peft_name(n, target, x): self._whole(target, x) for n, target in places for x in "AB"}

    def stage_params(
        self, at: RankCoordinates, *, layers: Iterable[int], first: bool, last: bool
    ) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        blocks = [
            (f"decoder.layers.{layer}.{block}", target)
            for layer in layers
            for block in _BLOCKS
            for target in self.lora.names
            if target in PROJECTIONS and (target in ATTENTION_TARGETS) == (block == "self_attention")
        ]
        blocks += [("output_layer", OUTPUT_LAYER)] * (last and self.on_output_layer)
        return {
            f"{block}.lora.{target}.{matrix}": self._cut(target, matrix, at)
            for block, target in blocks
            for matrix in "AB"
        }

    def local_shape(self, param_name: str, at: RankCoordinates) -> Shape:
        """See ``ModelMapping``."""
        _, target, matrix = self._part(param_name)
        return self._cut(target, matrix, at)

    def pieces(self, param_name: str, at: RankCoordinates) -> list[Piece]:
        """See ``ModelMapping``."""
        layer, target, matrix = self._part(param_name)
        name, local = peft_name(layer, target, matrix), self._cut(target, matrix, at)
        whole = self._whole(target, matrix)
        if local == whole:
            return [same(name, local)]
        if matrix == "A":
            return [Piece(name, Box((0, at.tensor_rank * local[1]), local), Box.whole(local))]
        first = at.tensor_rank * local[0]
        rows = min(local[0], whole[0] - first)  # of the vocabulary, without padding
        return [band(name, first, 0, (rows, local[1]))] if rows > 0 else []

    def _whole(self, target: str, matrix: str) -> Shape:
        outputs, inputs = projection_shape(self.shape, target)
        return (self.lora.rank, inputs) if matrix == "A" else (outputs, self.lora.rank)

    def _cut(self, target: str, matrix: str, at: RankCoordinates) -> Shape:
        rows, columns = self._whole(target, matrix)
        if target == OUTPUT_LAYER and matrix == "B":
            rows = self.shape.padded_vocab(at.tensor, at.vocab_multiple)
        if (target in ROW_PARALLEL) != (matrix == "A"):
            return rows, columns
        return (rows, columns // at.tensor) if matrix == "A" else (rows // at.tensor, columns)

    def _part(self, param_name: str) -> tuple[int, str, str]:
        """Layer, projection, and A or B."""
        match = _PARAMETER.fullmatch(param_name)
        if not match or match[2] not in self.lora.names or (match[1] is None) != (match[2] == OUTPUT_LAYER):
            raise MappingError(f"{param_name}: not a parameter of an adapter by the settings (lora)")
        return int(match[1] or 0), match[2], match[3]


@dataclass(frozen=True)
class AdaptedMapping:
    """``ModelMapping`` of a model and its adapters."""

    model: ModelMapping
    adapters: AdapterMapping

    @property
    def shape(self) -> ModelShape:
        """See ``ModelMapping``."""
        return self.model.shape

    @property
    def float32(self) -> frozenset[str]:
        """See ``ModelMapping``."""
        return self.model.float32

    def stored_parts(self, param_name: str) -> list[str]:
        """See ``ModelMapping``."""
        return self._of(param_name).stored_parts(param_name)

    @property
    def parameters(self) -> int:
        """See ``ModelMapping``."""
        return self.model.parameters + self.adapters.parameters

    def hf_tensors(self) -> dict[str, Shape]:
        """See ``ModelMapping``; the adapters' come last."""
        return self.model.hf_tensors() | self.adapters.hf_tensors()

    def stage_params(
        self, at: RankCoordinates, *, layers: Iterable[int], first: bool, last: bool
    ) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        layers = list(layers)
        model, adapters = (
            part.stage_params(at, layers=layers, first=first, last=last)
            for part in (self.model, self.adapters)
        )
        return model | adapters

    def local_shape(self, param_name: str, at: RankCoordinates) -> Shape:
        """See ``ModelMapping``."""
        return self._of(param_name).local_shape(param_name, at)

    def pieces(self, param_name: str, at: RankCoordinates) -> list[Piece]:
        """See ``ModelMapping``."""
        return self._of(param_name).pieces(param_name, at)

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

"""Mapping between PEFT's adapter tensors and the adapters beside Megatron's layers. No torch.

Each projection has an A [rank, inputs] and a B [outputs, rank]. Tensor parallelism cuts them as it cuts the
projection's weight: B by rows where that is column-parallel, A by columns where it is row-parallel. The other
one is whole on every rank. The output layer is column-parallel; its B is padded as its weight is.

The rows of B have the order of Megatron's weight. Where the projection's are in another one, PEFT's are too:
those of gated attention, and of linear attention with interleaved heads. Queries, keys and so on of linear
attention are cut each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.lora import (
    INTERLEAVED_TARGETS,
    LINEAR_TARGETS,
    OUTPUT_LAYER,
    SEPARATE_TARGETS,
    SOFTMAX_TARGETS,
    LoraSettings,
    Target,
)
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Box, MappingError, Piece
from rpg_megatron.models.layer import layer_parameters
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import Parameter, RankCoordinates, Segment, Shape, band, same

ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
PACKED: dict[str, tuple[Target, ...]] = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "self_attention.in_proj": (*SEPARATE_TARGETS, *INTERLEAVED_TARGETS),
    "self_attention.out_proj": ("out_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
"""Megatron's layer -> the projections in it, in the order of its rows (within a query group)."""
HEAD_ROWS = ("in_proj_b", "in_proj_a", "in_proj_ba")
"""Projections with a row, or two, for each value head."""
BANDS = {
    "in_proj_qkv": ("query", "key", "value"),
    "in_proj_qkvz": ("query", "key", "value", "z"),
    "in_proj_ba": ("beta", "alpha"),
}
"""Target -> the bands of B's rows that are cut each by itself, and stored so."""
_PARAMETER = re.compile(
    r"(?:decoder\.layers\.(\d+)\.(?:self_attention|mlp)|output_layer)\.lora\.(\w+)\.([AB])(?:\.(\w+))?"
)


def is_adapter(name: str) -> bool:
    """Whether this is Megatron's name of an adapter's parameter."""
    return ".lora." in name


def peft_name(s: ModelShape, layer: int, target: str, matrix: str) -> str:
    """Name of A or B in PEFT's file. layer: index from 0; of no meaning for the output layer."""
    return f"base_model.model.{weight_name(s, layer, target).removesuffix('.weight')}.lora_{matrix}.weight"


def weight_name(s: ModelShape, layer: int, target: str) -> str:
    """HF name of the weight that an adapter belongs to. layer: see ``peft_name``."""
    if target == OUTPUT_LAYER:
        return f"{target}.weight"
    return f"{s.prefix}layers.{layer}.{_in_layer(target)}"


def _in_layer(target: str) -> str:
    softmax, linear = target in SOFTMAX_TARGETS, target in LINEAR_TARGETS
    return f"{'self_attn' if softmax else 'linear_attn' if linear else 'mlp'}.{target}.weight"


def projection_shape(s: ModelShape, target: str) -> Shape:
    """Outputs and inputs of a projection that the model has, or of the output layer."""
    if target == OUTPUT_LAYER:
        return s.vocab_size, s.hidden_size
    if target in LINEAR_TARGETS:
        assert s.linear is not None
        rows = {"in_proj_b": s.linear.value_heads, "in_proj_a": s.linear.value_heads}
        outputs = sum(row_bands(s, target)) if target in BANDS else rows.get(target, s.linear.values)
    elif target in SOFTMAX_TARGETS:
        outputs = (s.num_kv_heads if target in ("k_proj", "v_proj") else s.num_heads) * s.head_dim
        outputs *= 1 + (s.gated_attention and target == "q_proj")
    else:
        outputs = s.ffn_hidden_size
    return (s.hidden_size, outputs) if target in ROW_PARALLEL else (outputs, s.hidden_size)


def row_bands(s: ModelShape, target: str) -> list[int]:
    """Rows of each of ``BANDS``; of other targets all rows."""
    if target in BANDS and (linear := s.linear) is not None:
        rows = {"value": linear.values, "z": linear.values}
        rows |= dict.fromkeys(("beta", "alpha"), linear.value_heads)
        return [rows.get(name, linear.keys) for name in BANDS[target]]
    return [projection_shape(s, target)[0]]


def packed_in(s: ModelShape, layer: int) -> dict[str, tuple[Target, ...]]:
    """Those of ``PACKED`` that a layer has, but for experts."""
    known = {*LoraSettings().names_in(s)} - {*(SOFTMAX_TARGETS if s.is_linear(layer) else LINEAR_TARGETS)}
    packed = {name: tuple(t for t in targets if t in known) for name, targets in PACKED.items()}
    other = "mlp." if s.has_experts(layer) else "-"
    return {name: targets for name, targets in packed.items() if targets and not name.startswith(other)}


@dataclass(frozen=True)
class AdapterMapping:
    """``ModelMapping`` of the adapters alone."""

    shape: ModelShape
    lora: LoraSettings

    @cached_property
    def names(self) -> tuple[Target, ...]:
        """The targets that the model has."""
        return self.lora.names_in(self.shape)

    def packed(self, layer: int) -> dict[str, tuple[Target, ...]]:
        """Of ``packed_in`` those with an adapter."""
        packed = packed_in(self.shape, layer).items()
        return {name: targets for name, targets in packed if not set(targets).isdisjoint(self.names)}

    def in_layer(self, layer: int) -> dict[Target, str]:
        """Target -> Megatron's block, of the adapters in a layer."""
        packed = self.packed(layer).items()
        return {t: name.split(".")[0] for name, targets in packed for t in targets if t in self.names}

    @property
    def on_output_layer(self) -> bool:
        """Whether the output layer has an adapter."""
        return OUTPUT_LAYER in self.names

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
        _, target, matrix, _ = self._part(param_name)
        if matrix == "A" or target not in BANDS:
            return [param_name]
        return [f"{param_name}.{each}" for each in BANDS[target]]

    def hf_tensors(self) -> dict[str, Shape]:
        """Name in PEFT's file and full shape of every tensor, layer by layer."""
        return dict(self._hf_tensors)

    @cached_property
    def _hf_tensors(self) -> dict[str, Shape]:
        places: list[tuple[int, str]] = [
            (n, target) for n in range(self.shape.num_layers) for target in self.in_layer(n)
        ]
        places += [(0, OUTPUT_LAYER)] * self.on_output_layer
        return {peft_name(self.shape, n, t, x): self._whole(t, x) for n, t in places for x in "AB"}

    def stage_params(
        self, at: RankCoordinates, *, layers: Iterable[int], first: bool, last: bool
    ) -> dict[str, Shape]:
        """See ``ModelMapping``."""
        blocks: list[tuple[str, str]] = [
            (f"decoder.layers.{layer}.{block}", target)
            for layer in layers
            for target, block in self.in_layer(layer).items()
        ]
        blocks += [("output_layer", OUTPUT_LAYER)] * (last and self.on_output_layer)
        return {
            f"{block}.lora.{target}.{matrix}": self._cut(target, matrix, at)
            for block, target in blocks
            for matrix in "AB"
        }

    def local_shape(self, param_name: str, at: RankCoordinates) -> Shape:
        """See ``ModelMapping``."""
        _, target, matrix, stored = self._part(param_name)
        if stored is not None:
            return row_bands(self.shape, target)[stored] // at.tensor, self.lora.rank
        return self._cut(target, matrix, at)

    def pieces(self, param_name: str, at: RankCoordinates) -> list[Piece]:
        """See ``ModelMapping``."""
        layer, target, matrix, stored = self._part(param_name)
        name, local = peft_name(self.shape, layer, target, matrix), self._cut(target, matrix, at)
        if matrix == "A":
            if local == self._whole(target, matrix):
                return [same(name, local)]
            return [Piece(name, Box((0, at.tensor_rank * local[1]), local), Box.whole(local))]
        if target == OUTPUT_LAYER:
            first = at.tensor_rank * local[0]
            rows = min(local[0], self.shape.vocab_size - first)  # without padding
            return [band(name, first, 0, (rows, local[1]))] if rows > 0 else []
        b = self._rows(layer, target, name)
        b = b if stored is None else replace(b, segments=(b.segments[stored],))
        return b.pieces("", at.tensor, at.tensor_rank)

    def _rows(self, layer: int, target: str, name: str) -> Parameter:
        """B as the rows of its projection in Megatron's weight. name: PEFT's."""
        module = next(module for module, targets in PACKED.items() if target in targets)
        weight = layer_parameters(self.shape, layer)[f"{module}.weight"]
        cut = "whole" if weight.cut == "columns" else weight.cut
        rows: list[Segment] = []
        for s in weight.segments:
            if s.name != _in_layer(target):
                continue
            if cut == "rows" and rows and rows[-1].first + rows[-1].rows == s.first:
                rows[-1] = replace(rows[-1], rows=rows[-1].rows + s.rows)
            else:
                rows.append(replace(s, name=name))
        return Parameter(tuple(rows), self.lora.rank, cut)

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

    def _part(self, param_name: str) -> tuple[int, str, str, int | None]:
        """Layer, projection, A or B, and which of ``BANDS``, if it is one of them."""
        match = _PARAMETER.fullmatch(param_name)
        layer, target = (int(match[1] or 0), match[2]) if match else (0, "")
        known = {OUTPUT_LAYER} & {*self.names} if match and match[1] is None else {*self.in_layer(layer)}
        bands = (None, *(BANDS.get(target, ()) if match and match[3] == "B" else ()))
        if not match or target not in known or match[4] not in bands:
            raise MappingError(f"{param_name}: not a parameter of an adapter by the settings (lora)")
        return layer, target, match[3], None if match[4] is None else bands.index(match[4]) - 1


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

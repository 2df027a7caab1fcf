"""Low-rank adapters beside Megatron's column- and row-parallel layers, whose weights are frozen.

A forward hook adds scale B A x to the output of a layer, so the layer and the names of its parameters stay
as they are. A and B are cut as ``models/lora.py`` says. The ranks exchange the products A x, which have
``rank`` columns: of a column-parallel layer in front of B, of a row-parallel one behind A, where they are
partial sums.

The output layer is not called; the log-prob head asks for ``head_parts``, since a sum of its weight and B A,
or the weight's gradient, would take gigabytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rpg_megatron.config.lora import OUTPUT_LAYER, LoraSettings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.lora import (
    BANDS,
    ROW_PARALLEL,
    AdapterMapping,
    peft_name,
    projection_shape,
    row_bands,
)


class Adapter(torch.nn.Module):
    """A and B of one projection: this rank's part. A as PEFT's (Kaiming), B zero."""

    def __init__(
        self, target: str, shape: ModelShape, rank: int, config: Any, key: str, padding: int = 0
    ) -> None:
        """key: the initial values depend on it alone, so that all layouts start from the same ones.

        padding: rows of the vocabulary that the ranks have in addition.
        """
        super().__init__()
        self.outputs, inputs = projection_shape(shape, target)
        self.row_parallel, self.padding = target in ROW_PARALLEL, padding
        self.bands = row_bands(shape, target)
        self.key = key
        a, b = _uniform((rank, inputs), 1 / math.sqrt(inputs), key), torch.zeros(self.outputs, rank)
        a, b = (self.own(a, 1), b) if self.row_parallel else (a, self.own(b, 0))
        self.A, self.B = (torch.nn.Parameter(x.to(config.params_dtype).contiguous()) for x in (a, b))
        cut, whole, dim = (self.A, self.B, 1) if self.row_parallel else (self.B, self.A, 0)
        tensor_parallel.set_tensor_model_parallel_attributes(cut, True, dim, 1)
        # With sequence parallelism a rank has the gradient of its tokens; Megatron then sums them.
        whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def cut(self) -> dict[str, int]:
        """Name of the parameter that is cut over the tensor-parallel ranks, and the dimension."""
        return {"A": 1} if self.row_parallel else {"B": 0}

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor; padding rows are zero."""
        ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        if len(self.bands) > 1 and dim == 0:
            return torch.cat([band.chunk(ranks)[rank] for band in whole.split(self.bands)])
        part: Tensor = F.pad(whole, (0, 0, 0, self.padding)).chunk(ranks, dim)[rank]
        return part


class Adapters(torch.nn.Module):
    """The adapters of an attention or MLP block, by projection; a child ``lora`` of that block."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        super().__init__()
        for name, adapter in adapters.items():
            self.add_module(name, adapter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A and B for Megatron's checkpoints."""
        state: dict[str, Any] = {}
        for name, adapter in self.named_children():
            assert isinstance(adapter, Adapter)
            tensors = make_sharded_tensors_for_checkpoint(
                adapter.state_dict(prefix="", keep_vars=True),
                f"{prefix}{name}.",
                adapter.cut,
                sharded_offsets,
                tp_group=mpu.get_tensor_model_parallel_group(),
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
            if name == OUTPUT_LAYER:  # layouts pad the vocabulary differently
                tensors[f"{prefix}{name}.B"].allow_shape_mismatch = True
            if name in BANDS:  # as Megatron splits in_proj
                rows = [band // mpu.get_tensor_model_parallel_world_size() for band in adapter.bands]
                b = _split_tensor_factory(tensors[f"{prefix}{name}.B"], rows, list(BANDS[name]), 0)
                tensors[f"{prefix}{name}.B"] = b
            state |= tensors
        return state


class AdapterHook:
    """Adds the adapters of one layer to its output; a forward hook."""

    def __init__(
        self, parts: Sequence[tuple[Adapter | None, int]], groups: int, scale: float, config: Any
    ) -> None:
        """parts: the projections of the layer, each with its number of columns on this rank. groups: the
        layer's columns are those of ``groups`` query groups, each with its share of every projection.
        """
        self.adapters = [adapter for adapter, _ in parts if adapter is not None]
        self._parts, self._groups, self._scale = parts, groups, scale
        self._config = config
        self._group = mpu.get_tensor_model_parallel_group()

    def __call__(self, _: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The output of the layer with that of its adapters."""
        layer_output, bias = output
        return layer_output + self.delta(inputs[0]), bias

    def delta(self, x: Tensor) -> Tensor:
        """Scale B A x, [tokens, 1, columns of this rank], for the layer's input."""
        if self.adapters[0].row_parallel:
            (adapter,) = self.adapters
            return F.linear(self._sum_low_rank(F.linear(x, adapter.A)) * self._scale, adapter.B)
        low_rank = self.project_down(x, torch.cat([adapter.A for adapter in self.adapters]))
        low_rank_parts = iter(low_rank.split([adapter.A.size(0) for adapter in self.adapters], -1))
        columns = [
            low_rank.new_zeros(*low_rank.shape[:-1], self._groups, width // self._groups)
            if adapter is None
            else F.linear(next(low_rank_parts), adapter.B).unflatten(-1, (self._groups, -1))
            for adapter, width in self._parts
        ]
        return torch.cat(columns, -1).flatten(-2)

    def project_down(self, x: Tensor, a: Tensor) -> Tensor:
        """Scale A x of all tokens, [tokens, 1, rows of A], for the input of a column-parallel layer."""
        return gather_tokens(F.linear(x, a), self._config, self._group) * self._scale

    def _sum_low_rank(self, low_rank: Tensor) -> Tensor:
        """The sum of the ranks' A x; with sequence parallelism of this rank's tokens."""
        reduce = (
            tensor_parallel.reduce_scatter_to_sequence_parallel_region
            if self._config.sequence_parallel
            else tensor_parallel.reduce_from_tensor_model_parallel_region
        )
        total: Tensor = reduce(low_rank, group=self._group)
        return total

    def merge(self, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The layer's weight plus scale B A, computed in float32 and rounded once.

        out: a tensor to compute it in, if it is float32; there is no other of this size then.
        """
        if out is None or out.dtype != torch.float32:
            out = torch.empty_like(weight, dtype=torch.float32)
        rows, start = out.copy_(weight).unflatten(0, (self._groups, -1)), 0
        for adapter, width in self._parts:
            part = rows[:, start : start + width // self._groups]
            start += part.size(1)
            if adapter is not None:
                a, b = adapter.A.float(), adapter.B.float()
                b = b.unflatten(0, (self._groups, -1))
                part.baddbmm_(b, a.expand(self._groups, -1, -1), alpha=self._scale)
        return out.to(dtype)


def gather_tokens(part: Tensor, config: Any, group: Any) -> Tensor:
    """The values of all tokens, of which a tensor-parallel rank has a part with sequence parallelism.

    Backward: the sum of the ranks' gradients, each from its rows of the next weight.
    """
    if config.sequence_parallel:
        whole: Tensor = tensor_parallel.gather_from_sequence_parallel_region(
            part, tensor_parallel_output_grad=True, group=group
        )
    else:
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(part, group=group)
    return whole


def head_parts(output_layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of the output layer's adapter: scale A x of all tokens, [tokens, rank], and this rank's rows of B.

    Their product is added to the logits of this rank's vocabulary. hidden_states: the layer's input on this
    rank. None: it has no adapter.
    """
    if not hasattr(output_layer, "lora"):
        return None
    hook: AdapterHook = output_layer.lora.hook
    (adapter,) = hook.adapters
    return hook.project_down(hidden_states, adapter.A).squeeze(1), adapter.B


class LoraModel:
    """The adapters in this rank's chunks of a model, and what is done with all of them."""

    def __init__(
        self, chunks: Iterable[GPTModel], shape: ModelShape, settings: LoraSettings, seed: int
    ) -> None:
        """Add the adapters, and freeze all other parameters. seed: of the initial values."""
        self._hooks: dict[str, AdapterHook] = {}
        mapping = AdapterMapping(shape, settings)
        for chunk in chunks:
            chunk.requires_grad_(False)
            for layer in chunk.decoder.layers:
                self._add(layer, shape, mapping, seed)
            if chunk.post_process and mapping.on_output_layer:
                self._add_to_output_layer(chunk, mapping, seed)
            if chunk.pre_process and chunk.config.recompute_granularity is not None:
                # Recomputation drops the gradients inside if no input of the block has one.
                chunk.embedding.register_forward_hook(_with_gradient)

    def _add(self, layer: Any, shape: ModelShape, mapping: AdapterMapping, seed: int) -> None:
        number = layer.layer_number - 1
        lora, config = mapping.lora, layer.config
        tensor = mpu.get_tensor_model_parallel_world_size()
        in_layer = mapping.in_layer(number)
        adapters: dict[str, Adapter] = {
            t: Adapter(t, shape, lora.rank, config, f"{seed}/{peft_name(shape, number, t, 'A')}")
            for t in in_layer
        }
        for block in dict.fromkeys(in_layer.values()):
            own = Adapters({t: adapters[t] for t, place in in_layer.items() if place == block})
            layer.get_submodule(block).add_module("lora", own.to(next(layer.parameters()).device))
        for name, projections in mapping.packed(number).items():
            parts = [
                (adapters.get(t), projection_shape(shape, t)[0] // (1 if t in ROW_PARALLEL else tensor))
                for t in projections
            ]
            groups = shape.num_kv_heads // tensor if name.endswith("linear_qkv") else 1
            hook = AdapterHook(parts, groups, lora.scale, config)
            layer.get_submodule(name).register_forward_hook(hook)
            self._hooks[f"decoder.layers.{number}.{name}.weight"] = hook

    def _add_to_output_layer(self, chunk: GPTModel, mapping: AdapterMapping, seed: int) -> None:
        layer, lora = chunk.output_layer, mapping.lora
        rows = layer.weight.size(0)
        padding = rows * mpu.get_tensor_model_parallel_world_size() - mapping.shape.vocab_size
        key = f"{seed}/{peft_name(mapping.shape, 0, OUTPUT_LAYER, 'A')}"
        adapter = Adapter(OUTPUT_LAYER, mapping.shape, lora.rank, chunk.config, key, padding)
        layer.add_module("lora", Adapters({OUTPUT_LAYER: adapter}).to(layer.weight.device))
        hook = AdapterHook([(adapter, rows)], 1, lora.scale, chunk.config)
        layer.lora.hook = self._hooks["output_layer.weight"] = hook

    @torch.no_grad()
    def merged(
        self, name: str, weight: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """The weight of this (global) name with its adapters; None if it has none.

        dtype: to round the float32 sum to; None: the weight's. out: see ``AdapterHook.merge``.
        """
        hook = self._hooks.get(name)
        return None if hook is None else hook.merge(weight, dtype or weight.dtype, out)

    @property
    def adapted(self) -> list[str]:
        """Names of the weights that have adapters."""
        return list(self._hooks)

    @contextmanager
    def probe(self, size: float) -> Iterator[None]:
        """Within the block every B has known values, the same in all layouts.

        size: of scale B A x relative to x, if x has independent elements. A fresh adapter's B is zero, so one
        that engines do not apply, or apply in the wrong place, would not be seen.
        """
        adapters = [adapter for hook in self._hooks.values() for adapter in hook.adapters]
        kept = [adapter.B.detach().clone() for adapter in adapters]
        scale = next((hook._scale for hook in self._hooks.values()), 1.0)
        with torch.no_grad():
            for adapter in adapters:
                rank = adapter.B.size(1)
                b = _uniform(
                    (adapter.outputs, rank), 3 * size / scale / math.sqrt(rank), adapter.key + "/probe"
                )
                adapter.B.copy_(b if adapter.row_parallel else adapter.own(b, 0))
        try:
            yield
        finally:
            with torch.no_grad():
                for adapter, b in zip(adapters, kept, strict=True):
                    adapter.B.copy_(b)


class MergedWeights(dict[str, Tensor]):
    """A model's weights by name, of which ``[name]`` is merged with its adapters.

    The merged weight that was read last is kept: a weight is read slice by slice. ``items`` and ``values``
    give the weights without adapters, for their shapes.
    """

    def __init__(self, weights: Mapping[str, Tensor], adapters: LoraModel, dtype: torch.dtype) -> None:
        super().__init__(weights)
        self._adapters, self._dtype = adapters, dtype
        self._last: tuple[str, Tensor] | None = None

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            weight = super().__getitem__(name)
            merged = self._adapters.merged(name, weight, self._dtype)
            if merged is None:
                return weight
            self._last = name, merged
        return self._last[1]


def _uniform(shape: tuple[int, int], bound: float, key: str) -> Tensor:
    """Uniform numbers between -bound and bound, float32, which depend on the key alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _with_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

"""Loads published adapters into vLLM's own LoRA slots, and checks what the slots hold.

vLLM packs A and B per module, scales B, cuts it for the worker and copies it into the slot that its kernels
read. A checksum of what was read says nothing of that, so the slots are read back: each must hold the rows
or columns that the module's own weight has on this worker, that of the output layer the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from rpg_megatron.bridge.transports.mapped_reader import ShardError
from rpg_megatron.bridge.vllm.weight_loader import ModelPlan

ADAPTER_NAME, ADAPTER_ID = "rpg", 1
"""The adapter of the policy, by which requests name it."""
_PREFIX = "base_model.model."


def split_names(names: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The published tensors of the model, and those of adapters."""
    model = [name for name in names if not name.startswith(_PREFIX)]
    return model, [name for name in names if name.startswith(_PREFIX)]


@contextmanager
def without_wrappers(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the model's modules are those of a model without LoRA, which loaders know by name."""
    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


@torch.no_grad()
def load_adapters(model: Any, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Load A and B, by their names in PEFT's file, in place of the adapter that the engine has."""
    manager, mapper = _manager(model), getattr(model, "hf_to_vllm_mapper", None)
    layers: dict[str, LoRALayerWeights] = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            # A copy, since vLLM multiplies B in place.
            b = tensors[f"{_PREFIX}{module}.lora_B.weight"].clone()
            own = module if mapper is None else mapper.get_rename_mapper()._map_name(module)
            layers[own] = LoRALayerWeights(own, a.shape[0], 1, a, b, scaling=scale)
            layers[own].optimize()
    rank = max(layer.rank for layer in layers.values())
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(LoRAModel(ADAPTER_ID, rank, layers))
    manager.activate_adapter(ADAPTER_ID)


@torch.no_grad()
def check_slots(model: Any, plan: ModelPlan, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Check A, and B times the scale, in the slots of every module. Raises ShardError that names modules.

    plan: how the worker loads the model's own weights, recorded from its loaders; it says which rows and
    columns of a projection this worker has.
    """
    manager = _manager(model)
    if manager.lora_index_to_id != [ADAPTER_ID]:
        raise ShardError(
            f"the engine's LoRA slots hold {manager.lora_index_to_id}, expected [{ADAPTER_ID}]: it does not "
            "serve the adapter"
        )
    cuts = {
        layer.layer: sorted(
            (copy for name, copy in layer.copies if name == "weight"), key=lambda copy: copy.target.offset
        )
        for layer in plan.layers
    }
    wrong: list[str] = []
    checked: set[str] = set()  # a projection may have several slots
    for name, module in manager.modules.items():
        stacked = module.lora_a_stacked, module.lora_b_stacked
        slots: list[tuple[str, tuple[int | slice, ...], Any]]
        if isinstance(module, LogitsProcessorWithLoRA):  # adds B A x to the logits of all workers
            slots = [(f"{name}.weight", (slice(None), slice(None)), stacked)]
        else:
            pairs = zip(*stacked, strict=True)
            slots = [
                (copy.hf_name, copy.box.slices(), pair)
                for copy, pair in zip(cuts[module.base_layer], pairs, strict=True)
            ]
        for hf_name, cut, pair in slots:
            expected = _expected(hf_name, cut, tensors, scale)
            checked |= {hf_name} if expected is not None else set()
            for index, matrix in enumerate("AB"):
                if not _holds(pair[index], None if expected is None else expected[index]):
                    projection = hf_name.removesuffix(".weight").rpartition(".")[2]
                    wrong.append(f"{matrix} of {projection} in {name}")
    published = sum(name.endswith(".lora_A.weight") for name in tensors)
    if len(checked) != published:
        wrong.append(f"{published - len(checked)} of {published} projections have no module")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        listed = ", ".join(wrong[:5]) + more
        raise ShardError(f"the engine's slots do not hold the published adapters: {listed}")


def _expected(
    hf_name: str, cut: tuple[int | slice, ...], tensors: Mapping[str, Tensor], scale: float
) -> tuple[Tensor, Tensor] | None:
    """A and scaled B of a projection on this worker, the columns and rows of its weight; None if it has none.

    hf_name, cut: of the weight.
    """
    rows, columns = cut
    a, b = (tensors.get(f"{_PREFIX}{hf_name.removesuffix('weight')}lora_{x}.weight") for x in "AB")
    return None if a is None or b is None else (a[:, columns], b[rows] * scale)


def _holds(stacked: Tensor, expected: Tensor | None) -> bool:
    """Whether the only slot, [1, 1, rows, columns], holds these values and zeros otherwise."""
    slot = stacked[0, 0]
    if expected is None:
        return not bool(slot.any())
    m, n = expected.shape
    inside = m <= slot.size(0) and n <= slot.size(1)
    return (
        inside
        and torch.equal(slot[:m, :n], expected.to(slot.device, slot.dtype))
        and not bool(slot[m:].any() or slot[:, n:].any())
    )


def _manager(model: Any) -> Any:
    return model.lora_manager

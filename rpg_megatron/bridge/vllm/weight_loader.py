"""Loads published slices into vLLM's modules by a plan that is recorded once for each worker.

There are three ways; the first two are chosen module by module:

- *in place*: parameters keep the shape and strides that loaders write (unquantised on a GPU; norms
  everywhere), so slices are copied into the live tensors. Addresses stay, so captured CUDA graphs stay valid.
- *processed*: vLLM re-packs the module after loading (CPU kernels, quantised layers), so slices go into new
  tensors, the module's own processing runs, and its result is copied into the old tensors.
- *whole*: a loader of the model does more than copy slices, so full tensors are assembled and passed to
  ``load_weights``. Modules that are re-packed get their new tensors all at once, since a loader may write
  to any of them. (vLLM's reload sees what goes through a ``weight_loader`` only; gpt-oss writes directly.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_TENSORS,
    materialize_layer,
    restore_layer_on_meta,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
    get_tensor_load_numel,
)

from rpg_megatron.bridge.slice_table import TableCache
from rpg_megatron.bridge.transports.mapped_reader import Copies, Reader, ShardError
from rpg_megatron.bridge.vllm.load_recorder import Fill, LoadRecorder, SliceCopy
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.dtypes import ITEM_BYTES, torch_dtype

Signature = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(HF tensor name, dtype, shape) of each published tensor, in order."""

UNPROCESSED_ON_CUDA = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods that process weights after loading on a CPU only. Exact types: subclasses may reorder weights."""


@dataclass
class LayerPlan:
    """What one module receives: (parameter name, copy or fill)."""

    layer: torch.nn.Module
    names: set[str] = field(default_factory=set)
    """Parameters that loaders write, also those of which copies and fills are not known."""
    copies: list[tuple[str, SliceCopy]] = field(default_factory=list)
    fills: list[tuple[str, Fill]] = field(default_factory=list)
    in_place: bool = False
    tables: TableCache[Any] = field(default_factory=TableCache)
    """Of the copies of this module and of those that are loaded together with it."""


@dataclass
class ModelPlan:
    """What this worker reads in every sync: slices, or whole tensors if there is a ``reason``."""

    signature: Signature
    layers: list[LayerPlan]
    shared: list[torch.nn.Module] = field(default_factory=list)
    """Modules without a loader that share a parameter with a module in ``layers`` (tied embeddings)."""
    reason: str = ""

    def boxes(self) -> list[tuple[str, Box]]:
        """Every read of a sync: (HF tensor name, box)."""
        if self.reason:
            return [(name, Box.whole(shape)) for name, _, shape in self.signature]
        return [(copy.hf_name, copy.box) for plan in self.layers for _, copy in plan.copies]

    def rotate_layers(self, fraction: float) -> None:
        """Start at another layer, in cyclic order, so that engines do not all read from the same ranks first.

        fraction: position of the first layer, 0 to 1.
        """
        first = int(fraction * len(self.layers))
        self.layers = self.layers[first:] + self.layers[:first]

    @property
    def nbytes(self) -> int:
        """Bytes that a sync loads into the model."""
        item = {name: ITEM_BYTES[dtype] for name, dtype, _ in self.signature}
        return sum(item[name] * box.numel for name, box in self.boxes())


def record_plan(model: Any, device: torch.device, signature: Signature) -> ModelPlan:
    """Record the model's own ``load_weights`` on meta tensors; the model is unchanged on return.

    model: a vLLM model (an nn.Module with ``load_weights``).
    Raises ShardError if a published tensor does not fit the model, or a parameter would keep its values.
    """
    sources = {
        name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, dtype, shape in signature
    }
    live = {module: get_layer_params_buffers(module)[0] for module in model.modules()}
    live_tensors = [
        (module, name, tensor)
        for module, tensors in live.items()
        for name, tensor in tensors.items()
        if name in SKIP_TENSORS  # vLLM's reload loads these (biases) into the live tensors
    ]
    try:
        with torch.device(device):
            initialize_layerwise_reload(model)  # moves every other parameter to the meta device
        metas = {id(tensor): to_meta_tensor(tensor) for *_, tensor in live_tensors}  # modules share some
        for module, name, tensor in live_tensors:
            module._parameters[name] = metas[id(tensor)]
        targets = {
            f"{path}.{name}".lstrip("."): tensor
            for path, module in model.named_modules()
            for name, tensor in get_layer_tensors(module).items()
            if tensor.is_meta
        }
        for tensor in targets.values():
            _unwrap_loader(tensor)  # vLLM's wrappers would only buffer tensors
        recorder = LoadRecorder(sources, targets)
        current = ["(none)"]
        try:
            with recorder:
                model.load_weights(_track_names(sources, current))
        except Exception as e:
            shape = list(sources[current[0]].shape) if current[0] in sources else []
            raise ShardError(
                f"{current[0]} {shape}: the engine's model cannot load it ({type(e).__name__}: {e}); "
                "engine and trainer run different models, or its loader does more than copy tensors"
            ) from e
        plans = _plans_by_layer(model, recorder)
        shared = _check_complete(model, plans, live, recorder)
        for plan in plans.values():
            plan.in_place = _loads_in_place(plan, live[plan.layer], device)
        return ModelPlan(signature, list(plans.values()), shared, "; ".join(recorder.refused[:3]))
    finally:
        for module, name, tensor in live_tensors:
            module._parameters[name] = tensor
            _unwrap_loader(tensor)
        restore_layers(model)


@torch.no_grad()
def load_published(
    model: Any, model_config: Any, device: torch.device, plan: ModelPlan, reader: Reader
) -> None:
    """Load the reader's open version into the model. A failure leaves the model with mixed weights."""
    with torch.device(device):
        if plan.reason:
            _load_whole(model, plan.layers, reader)
        else:
            _load_slices(plan.layers, reader, overlap=device.type == "cpu")
        _refresh(plan.shared)
        for module in model.modules():
            # These modules derive tensors from other modules' weights; vLLM processes them last as well.
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(model_config.dtype)
    if device.type != "cpu":
        torch.accelerator.synchronize()


def restore_layers(model: torch.nn.Module) -> None:
    """Restore every module's own tensors, wherever a recording or an update was interrupted."""
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(module, info)
        if info.kernel_tensors is not None or info.can_load():
            info.reset()


def _track_names(sources: dict[str, torch.Tensor], current: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors for a loader; ``current[0]`` is the name being loaded."""
    for name, tensor in sources.items():
        current[0] = name
        yield name, tensor


def _plans_by_layer(model: torch.nn.Module, recorder: LoadRecorder[str]) -> dict[torch.nn.Module, LayerPlan]:
    plans: dict[torch.nn.Module, LayerPlan] = {}
    by_key: dict[str, tuple[LayerPlan, str]] = {}
    for key in recorder.written:
        path, _, name = key.rpartition(".")
        layer = model.get_submodule(path)
        plan, _ = by_key[key] = plans.setdefault(layer, LayerPlan(layer)), name
        plan.names.add(name)
    for key, copy in recorder.copies:
        plan, name = by_key[key]
        plan.copies.append((name, copy))
    for key, fill in recorder.fills:
        plan, name = by_key[key]
        plan.fills.append((name, fill))
    return plans


def _check_complete(
    model: torch.nn.Module,
    plans: Mapping[torch.nn.Module, LayerPlan],
    live: Mapping[torch.nn.Module, dict[str, torch.Tensor]],
    recorder: LoadRecorder[str],
) -> list[torch.nn.Module]:
    """Refuse a load that leaves part of a parameter unwritten; returns the modules for ``ModelPlan.shared``.

    live: parameters outside of the recording, where tied ones are the same object. Declared padding need not
    be written, but it is no copy of slices.
    """
    fed = {id(p) for module in plans for p in live[module].values()}
    shared, unwritten = [], []
    for path, module in model.named_modules():
        expected = _unprocessed_parameters(module)
        if module not in plans:
            if not expected or is_deferred_attention_layer(module):
                continue
            if all(id(p) in fed for p in live[module].values()):
                shared.append(module)
                continue
        for name, parameter in expected.items():
            written, size = recorder.count(parameter), parameter.numel()
            if written < get_tensor_load_numel(parameter):
                unwritten.append(f"{path}.{name} ({written} of {size} elements written)")
            elif written != size:
                recorder.refused.append(f"{path}.{name}: {written} of {size} elements are written")
    if unwritten:
        more = f" and {len(unwritten) - 5} more" if len(unwritten) > 5 else ""
        raise ShardError(
            f"the engine's {type(model).__name__} would keep old values in {', '.join(unwritten[:5])}{more}; "
            "engine and trainer run different models, or its loader does more than copy tensors"
        )
    return shared


def _loads_in_place(plan: LayerPlan, live: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Whether this module can be loaded by copying into its live parameters."""
    if _is_processed(plan.layer, device):
        return False
    expected = _unprocessed_parameters(plan.layer)
    return all(
        name in live
        and name in expected
        and live[name].shape == expected[name].shape
        and live[name].stride() == expected[name].stride()
        and live[name].dtype == expected[name].dtype
        and live[name].device.type == device.type
        for name in plan.names
    )


def _is_processed(layer: torch.nn.Module, device: torch.device) -> bool:
    """Whether vLLM re-packs this module's weights after loading."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    if device.type != "cuda":
        return True
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if type(method) is UnquantizedFusedMoEMethod:  # the other backends reorder experts
        return method.unquantized_backend is not UnquantizedMoeBackend.TRITON
    return type(method) not in UNPROCESSED_ON_CUDA


def _unprocessed_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters as loaders expect them, while they are on the meta device."""
    return {name: tensor for name, tensor in get_layer_params_buffers(module)[0].items() if tensor.is_meta}


def _load_slices(plans: list[LayerPlan], reader: Reader, overlap: bool) -> None:
    """Fill all modules; with ``overlap`` the next module's slices are copied while one is re-packed.

    Not on a GPU, where streams are per thread: copies of another thread would race with the re-packing.
    """
    packing: torch.nn.Module | None = None
    with ThreadPoolExecutor(1) as copier:
        # Modules in a row that are loaded in place are loaded together.
        rows = groupby(plans, lambda plan: None if plan.in_place else plan.layer)
        for group in (list(group) for _, group in rows):
            (plan, *_) = group
            if plan.in_place:
                _copy_slices(group, reader)
                continue
            _begin_reload(plan.layer)
            if not overlap:
                _copy_slices(group, reader)
                _finish_reload(plan.layer)
                continue
            copying = copier.submit(_copy_slices, group, reader)
            try:
                if packing is not None:
                    _finish_reload(packing)
            finally:
                copying.result()
            packing = plan.layer
        if packing is not None:
            _finish_reload(packing)


def _begin_reload(layer: torch.nn.Module) -> None:
    """Start vLLM's layerwise reload of one module: gives it new parameters as loaders expect them."""
    info = get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    materialize_layer(layer, info)
    for tensor in get_layer_tensors(layer).values():
        _unwrap_loader(tensor)


def _finish_reload(layer: torch.nn.Module) -> None:
    """Run the module's own processing; the results are copied into the old tensors, whose addresses stay."""
    info = get_layerwise_info(layer)
    _process(layer)
    _copy_and_restore_kernel_tensors(layer, info)
    info.reset()


@torch.no_grad()
def _copy_slices(plans: Sequence[LayerPlan], reader: Reader) -> None:
    """May run in another thread, which has neither the default device nor the torch modes of the main one."""
    for plan in plans:
        for name, fill in plan.fills:
            fill.target.on(getattr(plan.layer, name).data).fill_(fill.value)

    def targets() -> list[torch.Tensor]:
        return [
            copy.target.on(getattr(plan.layer, name).data).view(copy.box.extent)
            for plan in plans
            for name, copy in plan.copies
        ]

    wanted = [(copy.hf_name, copy.box) for plan in plans for _, copy in plan.copies]
    memory = [getattr(plan.layer, name).data for plan in plans for name in {n for n, _ in plan.copies}]
    reader.load(Copies(wanted, memory, targets, plans[0].tables))


def _load_whole(model: Any, plans: list[LayerPlan], reader: Reader) -> None:
    """Pass full tensors to the model's loaders; what is re-packed needs its memory twice meanwhile."""
    assert reader.manifest is not None
    processed = [plan.layer for plan in plans if not plan.in_place]
    for layer in processed:
        _begin_reload(layer)
    model.load_weights((name, reader.whole(name)) for name in reader.manifest.tensors)
    for layer in processed:
        _finish_reload(layer)


def _refresh(shared: list[torch.nn.Module]) -> None:
    """Re-pack tied modules: on a CPU they keep a packed copy of the parameter, which would be stale."""
    for module in shared:
        if hasattr(module, "cpu_linear"):
            _process(module)


def _process(layer: Any) -> None:
    """Run a module's own processing after loading: re-packing, quantisation."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            delattr(layer, "_already_called_process_weights_after_loading")
        kernel = getattr(method, "moe_kernel", None)
        method.process_weights_after_loading(layer)
        unchanged = kernel is getattr(method, "moe_kernel", None)
        if kernel is not None and unchanged and next(layer.parameters()).device.type == "cpu":
            # vLLM packs experts for a CPU only when it makes their kernel.
            kernel.fused_experts.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()


def _unwrap_loader(tensor: Any) -> None:
    tensor.weight_loader = _get_original_loader(tensor)

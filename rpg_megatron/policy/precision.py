"""Layers and precision of the policy: Megatron's local layers or Transformer Engine, bfloat16 or FP8.

Written for Megatron-Core 0.19.2 and Transformer Engine 2.20.2; docs/performance.md lists what has run on a
GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.policy import FP8Settings
from rpg_megatron.policy.lora import LoraModel

HOPPER = (9, 0)
"""Lowest compute capability that supports all FP8 recipes."""


def uses_transformer_engine(settings: Settings, device: torch.device) -> bool:
    """Whether the policy uses Transformer Engine's layers on this device; never on a CPU.

    Raises UserError if settings require them and the package is missing or the GPU does not support FP8.
    """
    implementation, fp8 = settings.model.implementation, settings.precision.fp8
    if device.type == "cpu":
        return False
    if fp8 is not None and torch.cuda.get_device_capability(device) < HOPPER:
        raise UserError(
            f"precision.fp8: {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and FP8 training needs 9.0 "
            "(Hopper) or later; set precision.fp8=null"
        )
    suits = settings.has_fused_layers(device.type)
    available = suits and importlib.util.find_spec("transformer_engine") is not None
    if not available and (fp8 is not None or implementation == "transformer_engine"):
        key, other = ("precision.fp8", "null") if fp8 is not None else ("model.implementation", "local")
        raise UserError(
            f"{key}: the package transformer_engine is not installed; install requirements/gpu.txt and "
            f"requirements/te-torch.txt (README.md, On a cluster), or set {key}={other}"
        )
    return available


def fused_weight_gradients(device: torch.device) -> bool:
    """Whether Megatron's local layers can add weight gradients in place, which needs a kernel of apex."""
    return device.type == "cuda" and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def fp8_fields(fp8: FP8Settings | None) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for an FP8 recipe; empty without one."""
    if fp8 is None:
        return {}
    fields = {
        # With a scale for each block, gradients need no wider exponent than activations.
        "fp8": "e4m3" if fp8.recipe == "blockwise" else "hybrid",
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.parameters,
        "first_last_layers_bf16": fp8.first_last_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.first_last_bf16,
        "num_layers_at_end_in_bf16": fp8.first_last_bf16,
    }
    if fp8.recipe == "delayed":
        fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return fields


def loadable(params: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor to load values into) for each parameter; call ``quantise`` after loading.

    For an FP8 parameter it is the bfloat16 tensor in host memory that Megatron's optimizer starts from.
    """
    for name, p in params:
        yield name, _initial_value(p) if is_float8tensor(p) else p


@torch.no_grad()
def quantise(params: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """After loading: set the FP8 parameters to the loaded values."""
    for _, p in params:
        if is_float8tensor(p):
            p.copy_(_initial_value(p))
            if not p.requires_grad:  # else the optimizer starts from it, and frees it
                p.clear_high_precision_init_val()  # type: ignore[attr-defined]  # its own class has it


def _initial_value(p: Any) -> Tensor:
    """The bfloat16 tensor that Transformer Engine keeps with an FP8 parameter, for the optimizer."""
    value: Tensor = p.get_high_precision_init_val()
    return value


class ExportedWeights:
    """A rank's weights by name, in precision.dtype, for engines and exports.

    These are the parameters themselves; for FP8 parameters, dequantised copies, and for weights that are
    merged with adapters, the sums, as of the last ``refresh``.
    """

    def __init__(
        self, params: Iterable[tuple[str, torch.nn.Parameter]], adapters: LoraModel | None = None
    ) -> None:
        """adapters: to be merged."""
        self.tensors: dict[str, Tensor] = dict(params)
        self._adapters = adapters
        adapted = () if adapters is None else adapters.adapted
        self._derived = {n: p for n, p in self.tensors.items() if is_float8tensor(p) or n in adapted}
        for name, p in self._derived.items():  # whose ``dtype`` is the unquantised one
            self.tensors[name] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)

    @property
    def merges(self) -> bool:
        """Whether adapters are merged."""
        return self._adapters is not None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies and sums."""
        for name, p in self._derived.items():
            weight: Tensor = p.dequantize() if is_float8tensor(p) else p
            copy = self.tensors[name]
            merged = None if self._adapters is None else self._adapters.merged(name, weight, out=copy)
            copy.copy_(weight if merged is None else merged)

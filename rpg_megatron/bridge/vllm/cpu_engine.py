"""What vLLM's CPU build lacks, or does in a way that is not for us; nothing of it is changed on a GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import socket
import stat
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_PLAIN_EXPERTS = "RPG_PLAIN_EXPERTS"


def adapt_to_cpu() -> None:
    """Adapt this vLLM process, if it is one for a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if importlib.util.find_spec("torchvision") is None:
        _stand_in_for_torchvision()
    _compute_delta_nets_in_float32()
    _draw_seeds_in_blocks()
    _normalize_by_kernels(current_platform)
    _adapt_config(current_platform)
    if _PLAIN_EXPERTS in os.environ:  # a worker, which gets a configuration that was checked elsewhere
        _compute_experts_without_adapters()


class _Absent(ModuleType):
    """A module of which every attribute is an empty class with the names of interpolations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
        made = type(name, (), dict.fromkeys(modes, name))
        setattr(self, name, made)
        return made


def _stand_in_for_torchvision() -> None:
    """Let the modules of models with vision towers be imported: without images they call none of it.

    Its builds for CUDA break the import of vLLM's CPU build, so it is not installed.
    """
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # keeps its answer, which is no
    names = ("", ".io", ".ops", ".transforms", ".transforms.v2", ".transforms.functional")
    for name in (f"torchvision{rest}" for rest in (*names, ".transforms.v2.functional")):
        module = sys.modules[name] = _Absent(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def _compute_delta_nets_in_float32() -> None:
    """Let float32 models have gated delta nets: vLLM's own core takes bfloat16 only, and keeps those.

    It is replaced when a worker registers it: to import its module takes seconds, also in the server.
    """
    from vllm.utils import torch_utils

    register = torch_utils.direct_register_custom_op

    def register_ours(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> None:
        if op_name == "cpu_gdn_attention_core":
            from rpg_megatron.bridge.vllm.cpu_delta_net import in_float32

            op_func = in_float32(op_func)
        register(op_name, op_func, *args, **kwargs)

    torch_utils.direct_register_custom_op = register_ours


def _draw_seeds_in_blocks() -> None:
    """Let vLLM draw 64 seeds at a time from a request's generator, not one in each step, which takes a tenth
    of a small model's step. They are the same, and so are the tokens.
    """
    ops: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    plain, end = ops.TopKTopPSampler.forward_cpu, 2**31
    unused: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()

    def forward(self: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], *top: Any) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return plain(self, logits, generators, *top)
        logits = ops.apply_top_k_top_p(logits, *top)
        seeds = torch.randint(end, (len(logits),)).tolist()
        for row, generator in generators.items():
            if not (own := unused.setdefault(generator, [])):
                own += torch.randint(end, (64,), generator=generator).tolist()[::-1]
            seeds[row] = own.pop()
        tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds))
        return tokens, logits.log_softmax(-1, torch.float32)

    ops.TopKTopPSampler.forward_cpu = forward


def _normalize_by_kernels(current_platform: Any) -> None:
    """Let float32 models compute RMS norms by kernels that vLLM's CPU build has, but calls on GPUs only: each
    replaces six operations of torch, a tenth of a small model's step.

    They take vectors of 16 numbers, rows without gaps. bfloat16, which they would round otherwise than the
    trainer (weights are applied after rounding), stays with torch.
    """
    from vllm import ir
    from vllm.config.kernel import IrOpPriorityConfig

    kernels = torch.ops._C

    def can_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        if weight is None or variance_size is not None or x.shape[-1] % 16:
            return False
        return x.dtype == weight.dtype == torch.float32 and weight.is_contiguous()

    def can_add(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
        return whole and can_norm(x, weight, epsilon, variance_size)

    @ir.ops.rms_norm.register_impl("cpu_kernel", supports_args=can_norm)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        kernels.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl("cpu_kernel", supports_args=can_add, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        kernels.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    def priorities(cls: type[Any], vllm_config: Any) -> Any:
        first = ["cpu_kernel", "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=first, fused_add_rms_norm=first)

    type(current_platform).get_default_ir_op_priority = classmethod(priorities)


def _adapt_config(current_platform: Any) -> None:
    """When a configuration is checked: let a server fork its core, if that starts no workers, and mixtures
    whose attention has adapters compute experts as without.

    vLLM spawns the core, so that it is pinned to cores, and it imports everything again. Ours are not pinned.
    """
    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_fork(_: type[Any], config: Any) -> None:
        check(config)
        if config.parallel_config.world_size == 1:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if config.lora_config is not None and config.model_config.is_moe:
            os.environ[_PLAIN_EXPERTS] = "1"
            _compute_experts_without_adapters()

    platform.check_and_update_config = classmethod(check_and_fork)
    os.register_at_fork(after_in_parent=gc.freeze, after_in_child=_leave_server)


def _compute_experts_without_adapters() -> None:
    """With adapters vLLM chooses experts by Triton, which has no CPU; here no expert has an adapter."""
    name = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    method: Any = importlib.import_module(name)
    select = method.select_unquantized_moe_backend

    def select_plain(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    method.select_unquantized_moe_backend = select_plain


def prepare_model(model: Any, config: Any, mark: Callable[..., None]) -> None:
    """Let a worker's model call ``mark`` in front of each layer, since a step can take minutes; and one with
    latent attention rotate copies. vLLM's kernel for a CPU takes parts of heads for whole ones, and rotates
    what lies between, without an error.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for layer in getattr(getattr(model, "model", None), "layers", ()):
        layer.register_forward_pre_hook(mark)
    for module in model.modules() if config.is_deepseek_mla else ():
        if isinstance(module, RotaryEmbedding):
            module._forward_method = module.forward_native


def _leave_server() -> None:
    """In a forked core: close the server's socket, which else accepted connections after the server's end.

    What exists now stays, on both sides: vLLM looks for garbage five times while the core starts, which would
    also copy the memory that the two share.
    """
    gc.freeze()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the folder itself
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as held:
                    try:
                        held.getpeername()
                    except OSError:  # it has none
                        os.dup2(nothing, descriptor)
    os.close(nothing)

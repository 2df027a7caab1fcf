"""Optimizers: AdamW in Megatron's (distributed) optimizer, on GPU and CPU, Schedule-Free AdamW, and Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import schedulefree
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from rpg_megatron.checkpoints.plain_loading import allow_optimizers
from rpg_megatron.config.policy import MemorySettings, OptimizerSettings, PrecisionSettings
from rpg_megatron.system.collectives import default_group_on_host
from rpg_megatron.system.dtypes import torch_dtype


class CpuAdam(torch.optim.Optimizer):
    """AdamW with the state format of the fused GPU optimizers: ``step`` per group, moments per parameter.

    Megatron's distributed optimizer can save and reshard that format, but not torch's with ``step`` per
    parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode or not bias_correction or capturable:
            raise ValueError("CpuAdam is AdamW with bias correction and without CUDA graphs")
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True},
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # Megatron passes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if not group["params"]:  # as in the fused optimizers, an empty group counts no steps
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            bias1, bias2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(
                    mean, (square.sqrt() / math.sqrt(bias2)).add_(group["eps"]), value=-group["lr"] / bias1
                )


class ScheduleFreeAdamW(schedulefree.AdamWScheduleFree):
    """Schedule-Free AdamW with the constructor that Megatron calls."""

    def __init__(
        self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **settings: Any
    ) -> None:
        if not adam_w_mode or capturable:
            raise ValueError("ScheduleFreeAdamW supports neither coupled weight decay nor CUDA graphs")
        super().__init__(params, **settings)


class OffloadingAdam(torch.optim.Adam):
    """AdamW for the GPU part of an optimizer whose other part is offloaded to the CPU.

    The fused optimizers keep ``step`` per group, and after loading a checkpoint Megatron would reset it to
    the loaded value before every update. Torch's class keeps it per parameter. It must not be AdamW, which
    Megatron uses for the CPU part.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, decoupled_weight_decay=True, **settings)


allow_optimizers(OffloadingAdam)


@contextmanager
def _inner_optimizer(kind: str) -> Iterator[None]:
    """Within the block, Megatron builds its optimizers with the right inner class.

    For AdamW that is the one Megatron found (Transformer Engine's or apex's), or CpuAdam if it found neither.
    """
    original = megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER
    if kind == "schedule_free_adamw":
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = ScheduleFreeAdamW, False
    elif kind == "offloading":
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = OffloadingAdam, True
    elif not distributed_optimizer.HAVE_APEX_OR_TE:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = CpuAdam, False
        # These changes stay: they tell the distributed optimizer where CpuAdam keeps its step.
        distributed_optimizer.Adam, distributed_optimizer.HAVE_APEX_OR_TE = CpuAdam, True
        # Synchronises the step with ranks that own an empty group; otherwise a resumed run is silently wrong.
        distributed_optimizer.USING_APEX_OPTIMIZER = True
    elif distributed_optimizer.Adam is CpuAdam:  # set up by an earlier policy of this process
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = CpuAdam, False
    try:
        yield
    finally:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = original


def wrap_data_parallel(
    chunks: Sequence[GPTModel],
    settings: OptimizerSettings,
    precision: PrecisionSettings,
    replicas: int,
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP: gradients are accumulated and reduced in float32.

    replicas: data x context ranks. With several, and ``settings.overlap``, gradients are reduced during
    backward, and the distributed optimizer's new weights are gathered by the next forward pass, layer by
    layer, or by ``gather_weights``.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        # Transformer Engine's layers add to Megatron's buffers in their products, without apex. By Megatron's
        # own setting the output layer, which is not called, would ask for apex.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    overlap = settings.overlap and replicas > 1
    named = (named for chunk in chunks for named in chunk.named_parameters())
    # Biases of sigmoid routers are never trained.
    adapters = any(not p.requires_grad and not name.endswith(".router.expert_bias") for name, p in named)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=overlap,
        # Megatron gathers a parameter when its module is called, and those of adapters are not.
        overlap_param_gather=overlap and settings.distributed and not adapters,
        fp8_param_gather=precision.fp8 is not None and precision.fp8.parameters,
    )
    models = [
        # Of the virtual stages, only the first one's reduction cannot overlap with backward, so it is
        # bucketed.
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if overlap:
        # The schedule enters it for all micro-batches except the last, which completes the gradients.
        waits = [model.no_sync for model in models]
        for chunk in chunks:
            chunk.config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return models


def gather_weights(models: Sequence[DistributedDataParallel]) -> None:
    """Gather the updated weights on every rank now instead of in the next forward pass. Collective."""
    for model in models:
        if model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def optimizer_config(
    settings: OptimizerSettings, precision: PrecisionSettings, memory: MemorySettings
) -> OptimizerConfig:
    """Megatron's configuration, with float32 main weights and moments.

    Muon's momentum, with Nesterov's step, is orthogonalised by five Newton-Schulz steps, in the precision of
    the model, on whole matrices whatever the layout: query, key and value each by itself, gate and up
    together, as Megatron stores them. 0.2 * sqrt(max(rows, columns)) gives updates the size of AdamW's
    (arXiv 2502.16982), so both share one learning rate.
    """
    dtype = torch_dtype(precision.dtype)
    offload: dict[str, Any] = {}
    if memory.offload_optimizer:
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": memory.offload_optimizer,
            # One optimizer for each tensor, so that copies overlap with the computation of others.
            "overlap_cpu_optimizer_d2h_h2d": True,
            # The inner optimizer then owns the main weights, which offloading requires.
            "use_precision_aware_optimizer": True,
        }
    return OptimizerConfig(
        optimizer="muon" if settings.type == "muon" else "adam",
        muon_nesterov=True,
        muon_tp_mode="duplicated",
        muon_extra_scale_factor=0.2,
        muon_fp32_matmul_prec="highest" if dtype is torch.float32 else "medium",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp8_recipe=precision.fp8.recipe if precision.fp8 is not None else None,
        use_distributed_optimizer=settings.distributed,
        **offload,
    )


def build_optimizer(
    chunks: list[DistributedDataParallel],
    settings: OptimizerSettings,
    precision: PrecisionSettings,
    memory: MemorySettings,
) -> MegatronOptimizer:
    """The optimizer over float32 master weights of all chunks, with gradient-norm clipping."""
    config = optimizer_config(settings, precision, memory)
    kind = "offloading" if memory.offload_optimizer else settings.type
    # Ranks exchange their parameter groups as objects over the default group.
    with _inner_optimizer(kind), default_group_on_host():
        overrides = get_standard_config_overrides(config)
        # Float32 parameters of 16-bit models need a group of their own: within a group Megatron moves them to
        # the front, but finds their state by the order of the model. The override itself changes nothing.
        kept = ("*.A_log", "*.out_norm.weight")
        overrides[ParamKey(name=kept)] = ParamGroupOverride(min_lr=config.min_lr)
        optimizer = get_megatron_optimizer(config, chunks, overrides, use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if settings.type == "schedule_free_adamw":
            part.init_state_fn = _fill_schedule_free
        elif memory.offload_optimizer:
            part.init_state_fn = _fill_offloaded
            _fill_offloaded(part.optimizer)
    for group in optimizer.param_groups:  # Megatron sets this in its scheduler, which we do not use
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def _fill_schedule_free(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Create the state that a checkpoint is loaded into; Megatron would create AdamW's."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}


def _fill_offloaded(optimizer: HybridDeviceOptimizer, config: object = None) -> None:
    """As ``_fill_schedule_free``; Megatron would create the state by an update with random gradients."""
    for inner in optimizer.sub_optimizers:
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] |= {
                        "step": torch.zeros((), device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
    optimizer._sync_sub_optimizers_state_to_hdo()


def use_training_point(optimizer: MegatronOptimizer, training: bool) -> None:
    """Schedule-Free: set the weights to the point at which gradients are taken, or back to the average.

    No effect for other optimizers. Everything except updates uses the average.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if isinstance(inner, ScheduleFreeAdamW):
            inner.train() if training else inner.eval()
            if hasattr(part, "_copy_main_params_to_model_params"):  # 16-bit models have float32 main weights
                part._copy_main_params_to_model_params()

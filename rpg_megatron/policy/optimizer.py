"""AdamW as Megatron's (distributed) optimizer runs it, on a GPU by its fused kernels and on a CPU by ours."""

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
    get_megatron_optimizer,
    get_standard_config_overrides,
)

from rpg_megatron.config.policy import OptimizerSettings, PrecisionSettings
from rpg_megatron.policy.model import DTYPES


class CpuAdam(torch.optim.Optimizer):
    """AdamW with the state layout of the fused GPU optimizers: ``step`` in the group, moments a parameter.

    Megatron's distributed optimizer can save and reshard that layout and not torch's, which keeps ``step``
    per parameter.
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
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if not group["params"]:  # as the fused optimizers: an empty group does not count steps
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
    """Schedule-Free AdamW as Megatron constructs an optimizer."""

    def __init__(
        self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **settings: Any
    ) -> None:
        if not adam_w_mode or capturable:
            raise ValueError("ScheduleFreeAdamW decouples weight decay and knows no CUDA graphs")
        super().__init__(params, **settings)


@contextmanager
def _building_with(kind: str) -> Iterator[None]:
    """Make Megatron build its optimizers around the right class while the block runs.

    For AdamW that is what Megatron found (Transformer Engine's or apex's), or CpuAdam where it found neither.
    """
    found = megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER
    if kind == "schedule_free_adamw":
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = ScheduleFreeAdamW, False
    elif not distributed_optimizer.HAVE_APEX_OR_TE:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = CpuAdam, False
        # These stay: they tell the distributed optimizer, for good, where CpuAdam keeps its step.
        distributed_optimizer.Adam, distributed_optimizer.HAVE_APEX_OR_TE = CpuAdam, True
        # Aligns the step over ranks that own an empty group; without it a resumed run is silently wrong.
        distributed_optimizer.USING_APEX_OPTIMIZER = True
    elif distributed_optimizer.Adam is CpuAdam:  # set up by an earlier policy of this process
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = CpuAdam, False
    try:
        yield
    finally:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = found


def wrap_data_parallel(
    chunks: Sequence[GPTModel], settings: OptimizerSettings, precision: PrecisionSettings
) -> list[DistributedDataParallel]:
    """Megatron's DDP around each chunk: gradients are accumulated and reduced in float32."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=False,
        fp8_param_gather=precision.fp8 is not None and precision.fp8.parameters,
    )
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def build_optimizer(
    chunks: list[DistributedDataParallel], settings: OptimizerSettings, precision: PrecisionSettings
) -> MegatronOptimizer:
    """AdamW over float32 master weights of all chunks, with gradient-norm clipping."""
    dtype = DTYPES[precision.dtype]
    config = OptimizerConfig(
        optimizer="adam",
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
    )
    with _building_with(settings.type):
        optimizer = get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))
    if settings.type == "schedule_free_adamw":
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.init_state_fn = _fill_schedule_free
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler, which we do not use
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def _fill_schedule_free(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Make the state that a checkpoint is read into; Megatron would make that of AdamW."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}


def use_training_point(optimizer: MegatronOptimizer, training: bool) -> None:
    """Schedule-Free: put the weights at the point that gradients are taken at, or back at the average.

    Nothing happens for other optimizers. Everything but an update wants the average.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if isinstance(inner, ScheduleFreeAdamW):
            inner.train() if training else inner.eval()
            if hasattr(part, "_copy_main_params_to_model_params"):  # 16-bit models have float32 main weights
                part._copy_main_params_to_model_params()


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Rate of training step ``step`` (from 1): linear warm-up, then constant."""
    return settings.lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else settings.lr

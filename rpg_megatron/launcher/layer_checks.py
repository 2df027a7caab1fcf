"""Checks that trainer and engines support the model's kinds of layers. Imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
import math

from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.config.model_shape import Scales
from rpg_megatron.engine.command import context_length
from rpg_megatron.engine.hybrid_cache import hybrid_cache

CPU_LINEAR_HEADS = (64, 128)
"""Sizes of linear heads, of keys and values alike, that vLLM supports on a CPU in bfloat16. With others, an
engine starts and fails at each request."""
_NOT_ON_CPU = (
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--speculative-config"),
    *("--mamba-ssm-cache-dtype", "--mamba-cache-dtype", "--mamba-cache-mode"),
)
"""Options with which vLLM would split prompts, take tokens back that are in the states, or round states."""
_GIB = 1024**3


def check_layers(settings: Settings, shape: ModelShape) -> None:
    """Check the policy's layers. Raises UserError."""
    check_rows(settings, shape)
    mixed = shape.linear is not None and settings.precision.dtype != "float32"
    if mixed and not settings.optimizer.distributed:
        raise UserError(
            f"optimizer.distributed: false with {shape.family} models in {settings.precision.dtype}: "
            "Megatron cannot save the optimizer of their float32 parameters (rates and norms of linear "
            "attention); set it to true, with optimizer.type adamw, or precision.dtype to float32"
        )
    names = [argument.partition("=")[0].replace("_", "-") for argument in settings.engine.arguments]
    if shape.fp8_files and any(name.startswith("--hf-overrides") for name in names):
        raise UserError(
            "engine.arguments: --hf-overrides excludes weights in FP8 on disk, which engines ignore by this "
            "option; remove it, or convert the model to bfloat16 (docs/models.md)"
        )
    other = shape.fused_rows or shape.post_norm or shape.scales != Scales()
    # Projections in the towers of other families have the same names, and PEFT would adapt them, too.
    if settings.lora is not None and (other or (shape.is_part and shape.linear is None)):
        raise UserError(
            f"lora: {shape.family} models in this form (one tensor for several projections, norms behind "
            "blocks, multipliers, or a vision tower beside the decoder) have no adapters here; remove lora"
        )


def check_rows(settings: Settings, shape: ModelShape) -> None:
    """Check that the layers of the policy, or of a teacher, support the run's rows, layout and device."""
    parallel, shared = settings.parallel, settings.training.shared_from is not None
    if shape.windows is not None and shared:
        raise UserError(
            f"training.share_prompts: {shape.family} models have sliding windows, which would begin inside "
            "the shared prompts; set it to false"
        )
    if shape.windows is not None and parallel.context > 1 and settings.device == "cuda":
        raise UserError(
            "parallel.context: Transformer Engine's attention with context parallelism has no sliding "
            f"windows, and {shape.family} models have; set it to 1"
        )
    if shape.linear is None:
        return
    if shared:
        raise UserError(
            f"training.share_prompts: {shape.family} models have linear attention, whose state after a "
            "shared prompt would not reach its responses; set it to false"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise UserError(
            f"parallel.tensor: {parallel.tensor} with linear attention ({shape.family}) needs sequence "
            "parallelism, or each rank would train its norm on its own heads only; set parallel.sequence to "
            "true"
        )
    among = parallel.tensor * parallel.context
    for heads, name in ((shape.linear.key_heads, "key"), (shape.linear.value_heads, "value")):
        if heads % among:
            raise UserError(
                f"parallel: tensor {parallel.tensor} x context {parallel.context} does not divide the "
                f"{heads} {name} heads of linear attention (linear_num_{name}_heads in config.json); lower "
                "one"
            )


def check_delta_kernels(settings: Settings, shape: ModelShape) -> None:
    """Check that the kernels of linear attention are installed. Raises UserError."""
    if settings.device == "cuda" and shape.linear is not None and importlib.util.find_spec("fla") is None:
        raise UserError(
            f"python package flash-linear-attention is missing, which {shape.family} models need on a GPU; "
            "install requirements/gpu.txt in its own environment (README, On a cluster)"
        )


def check_linear_attention(settings: Settings, shape: ModelShape) -> None:
    """Check that engines support the model's linear attention, if it has any."""
    engine, linear, dtype = settings.engine, shape.linear, settings.precision.dtype
    if linear is None:
        return
    if linear.key_heads % engine.tensor:
        raise UserError(
            f"engine.tensor: {engine.tensor} does not divide the {linear.key_heads} key heads of linear "
            "attention (linear_num_key_heads in config.json); lower it"
        )
    if engine.quantization is not None:
        raise UserError(
            f"engine.quantization: {engine.quantization} is not supported with linear attention, which "
            f"{shape.family} models have; set it to null"
        )
    if settings.device != "cpu":
        return
    heads = linear.key_dim, linear.value_dim
    if dtype != "float32" and not (heads[0] == heads[1] and heads[0] in CPU_LINEAR_HEADS):
        raise UserError(
            f"precision.dtype: on a CPU vLLM computes linear attention in {dtype} with heads of "
            f"{' or '.join(map(str, CPU_LINEAR_HEADS))} for keys and values; the model has {heads[0]} and "
            f"{heads[1]} (linear_key_head_dim, linear_value_head_dim in config.json); set it to float32"
        )
    for argument in engine.arguments:
        if (name := argument.partition("=")[0].replace("_", "-")) in _NOT_ON_CPU:
            raise UserError(
                f"engine.arguments: {name} is not supported on a CPU with linear attention, which "
                f"{shape.family} models have; remove it"
            )


def check_hybrid_cache(settings: Settings, shape: ModelShape) -> None:
    """Check that ``engine.kv_cache_gib`` holds keys, values and states of a sequence of full length."""
    cache, tokens = hybrid_cache(settings, shape), context_length(settings, shape)
    given = settings.engine.kv_cache_gib
    # vLLM keeps one block empty.
    if cache is not None and given * _GIB < (needed := cache.sequence(tokens) + cache.block_bytes):
        raise UserError(
            f"engine.kv_cache_gib ({given:g}) is too small: one sequence of {tokens:,} tokens takes "
            f"{math.ceil(needed / _GIB * 1e4) / 1e4:g}, with its states of linear attention; raise it"
        )

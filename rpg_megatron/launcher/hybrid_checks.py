"""Checks of engines for models with linear attention. Imports neither torch nor vLLM."""

from __future__ import annotations

import math

from rpg_megatron.config import ModelShape, Settings, UserError
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

"""Megatron's specs of the layers of a model, by the kind of each layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from rpg_megatron.config.model_shape import ModelShape, YarnRope
from rpg_megatron.policy.attention import PackedAttention
from rpg_megatron.policy.delta_net import DeltaNet
from rpg_megatron.policy.latent_attention import LatentSelfAttention
from rpg_megatron.policy.layers import ResidualAdd, RMSNorm, SwiGLU, WideNorm
from rpg_megatron.policy.router_aux_loss import Router


def layer_specs(
    shape: ModelShape, config: TransformerConfig, *, separate_norms: bool = False, share_prompts: bool = False
) -> list[ModuleSpec]:
    """The spec of each layer. separate_norms, share_prompts: see ``build_model``."""
    fused = config.transformer_impl == "transformer_engine"
    fused_layer = partial(_fused_layer, separate_norms=separate_norms, share_prompts=share_prompts)
    make_layer = fused_layer if fused else _local_layer
    kinds: dict[Any, ModuleSpec] = {}
    specs: list[ModuleSpec] = []
    for n in range(shape.num_layers):
        kind = shape.has_experts(n), shape.window(n), shape.rope_of(n), shape.is_linear(n)
        if kind not in kinds:
            kinds[kind] = make_layer(shape, n)
            _set_norms(shape, kinds[kind], config)
            if shape.has_experts(n):
                kinds[kind].submodules.mlp.keywords["submodules"].router = Router
        specs.append(kinds[kind])
    return specs


def megatron_rotates(shape: ModelShape) -> bool:
    """Whether Megatron's rotary embedding can do it: whole heads, all layers alike, without a factor.

    Latent attention rotates by itself.
    """
    if shape.latent is not None:
        return False
    ropes = {shape.rope_of(n) for n in range(shape.num_layers)}
    return ropes == {shape.rope} and shape.rope.fraction == 1 and not isinstance(shape.rope.scaling, YarnRope)


def _local_layer(shape: ModelShape, n: int) -> ModuleSpec:
    """Spec of Megatron's local layer ``n``, with our norms, attention and activation."""
    experts = shape.has_experts(n)
    layer = get_gpt_layer_local_spec(
        num_experts=shape.experts.count if experts and shape.experts else None,
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    mlp = parts.mlp.keywords["submodules"]
    for block in (mlp.experts, mlp.shared_experts) if experts else (parts.mlp,):
        block.keywords["submodules"].activation_func = SwiGLU
    if shape.is_linear(n):
        parts.self_attention = delta_net(ColumnParallelLinear, RMSNorm, RowParallelLinear)
        # In checkpoints the norm has the name that it has in Transformer Engine's layers.
        names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
        parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **names}
        return layer
    attention = parts.self_attention.submodules
    rope = None if shape.latent else shape.rope_of(n)
    attention.core_attention = ModuleSpec(PackedAttention, params={"rope": rope, "window": shape.window(n)})
    if shape.latent is not None:
        parts.self_attention = ModuleSpec(LatentSelfAttention, {"shape": shape}, attention)
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        up = "self_attention.linear_{}_up_proj.layer_norm_"  # the same as above
        names = {f"self_attention.{n}_layernorm.": up.format(n) for n in ("q", "kv")}
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        parts.sharded_state_dict_keys_map = names
    elif shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _fused_layer(shape: ModelShape, n: int, *, separate_norms: bool, share_prompts: bool) -> ModuleSpec:
    """Spec of Megatron's Transformer Engine layer ``n``, which supports packed sequences; experts are
    grouped.
    """
    experts = shape.has_experts(n)
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts.count if experts and shape.experts else None,
        moe_grouped_gemm=experts,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        multi_latent_attention=shape.latent is not None,
    )
    parts = layer.submodules
    if shape.is_linear(n):
        from megatron.core.extensions import transformer_engine as te

        linear = te.TEColumnParallelLinear if separate_norms else te.TELayerNormColumnParallelLinear
        # Transformer Engine's norm needs a weight of the input's dtype.
        parts.self_attention = delta_net(linear, RMSNorm, te.TERowParallelLinear)
    elif share_prompts or not megatron_rotates(shape):
        from rpg_megatron.policy.fused_attention import RotatingAttention

        parts.self_attention.submodules.core_attention = ModuleSpec(
            RotatingAttention, params={"rope": None if shape.latent else shape.rope_of(n)}
        )
    if shape.latent is not None:
        parts.self_attention = ModuleSpec(
            LatentSelfAttention, {"shape": shape}, parts.self_attention.submodules
        )
    if separate_norms or shape.post_norm:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        if shape.latent is not None:
            attention = parts.self_attention.submodules
            attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
            attention.q_layernorm = attention.kv_layernorm = TENorm
        elif not shape.is_linear(n):
            parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not experts:
            parts.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
    return layer


def delta_net(in_proj: type, out_norm: type, out_proj: type) -> ModuleSpec:
    """The spec of linear attention with these layers."""
    return ModuleSpec(DeltaNet, submodules=GatedDeltaNetSubmodules(in_proj, out_norm, out_proj))


def _set_norms(shape: ModelShape, layer: ModuleSpec, config: TransformerConfig) -> None:
    """Set the norms and sums that Megatron's layers do not have."""
    parts = layer.submodules
    if shape.wide_qk_norm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = partial(WideNorm, heads=shape.num_heads)
        attention.k_layernorm = partial(WideNorm, heads=shape.num_kv_heads)
    if shape.post_norm:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if shape.post_norm or shape.scales.residual != 1:
        norm = norm_type(config.transformer_impl == "transformer_engine") if shape.post_norm else None
        params = {"config": config, "norm": norm, "scale": shape.scales.residual}
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(ResidualAdd, params=params)


def norm_type(fused: bool) -> type:
    """The norm after the last layer, and behind blocks."""
    if not fused:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm  # type: ignore[no-any-return]

"""Reads the experts in a model's ``config.json``."""

from __future__ import annotations

from typing import Any

from rpg_megatron.config.families import Family
from rpg_megatron.config.model_keys import read_flag, read_positive, read_size
from rpg_megatron.config.model_shape import ExpertShape, SigmoidRouter

_MOST_EXPERTS = 2**17
"""In all layers: each has tensors with names of their own."""


def read_experts(raw: dict[str, Any], family: Family, layers: int) -> ExpertShape:
    """The experts of a mixture, with transformers' defaults for keys that the file lacks."""
    if family.sigmoid_router:
        return _sigmoid_experts(raw, family, layers)
    # transformers writes num_local_experts; published files have num_experts.
    counts = {key: read_size(key, raw[key]) for key in ("num_experts", "num_local_experts") if key in raw}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"num_experts is {raw['num_experts']}, but num_local_experts {raw['num_local_experts']}"
        )
    raw = {"num_experts_per_tok": 8, "decoder_sparse_step": 1} | family.defaults | raw
    count = next(iter(counts.values()), int(family.defaults.get("num_experts", 128)))
    if layers * count > _MOST_EXPERTS:
        raise ValueError(f"{layers} layers of {count} experts; at most {_MOST_EXPERTS:,} experts in all")
    per_token = read_size("num_experts_per_tok", raw["num_experts_per_tok"])
    normalised = read_flag(raw, "norm_topk_prob")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok is {per_token}, more than num_experts ({count})")
    if per_token == 1 and normalised:
        raise ValueError(
            "num_experts_per_tok is 1 with norm_topk_prob true: the router would have no gradient, and "
            "Megatron does not support it"
        )
    step = read_size("decoder_sparse_step", raw["decoder_sparse_step"])
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ValueError(f"mlp_only_layers is {repr(dense)[:80]}; it must be a list of layer indices")
    sparse = tuple(i for i in range(layers) if i not in set(dense) and (i + 1) % step == 0)
    if not sparse:
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    # OLMoE's experts have the size that dense layers have in other families.
    key = "moe_intermediate_size" if family.name != "olmoe" else "intermediate_size"
    size = read_size(key, raw[key])
    key = "shared_expert_intermediate_size"
    shared = read_size(key, raw[key]) if family.shared_expert else 0
    return ExpertShape(count, per_token, size, normalised, sparse, shared)


def _sigmoid_experts(raw: dict[str, Any], family: Family, layers: int) -> ExpertShape:
    """The experts of a family with ``sigmoid_router``."""
    ones = dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1)
    raw = (
        ones | {"num_experts_per_tok": 8} | family.defaults | {k: v for k, v in raw.items() if v is not None}
    )
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    count, per_token, size, shared = (read_size(key, raw[key]) for key in keys)
    groups, chosen = read_size("n_group", raw["n_group"]), read_size("topk_group", raw["topk_group"])
    dense = raw["first_k_dense_replace"]
    if type(dense) is not int or not 0 <= dense < layers:
        raise ValueError(
            f"first_k_dense_replace is {repr(dense)[:80]}; it must be less than num_hidden_layers "
            f"({layers}), and 0 or more"
        )
    kinds = raw.get("mlp_layer_types")  # which transformers reads, and vLLM the other key
    if kinds not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
        raise ValueError(f"mlp_layer_types and first_k_dense_replace ({dense}) differ")
    if layers * count > _MOST_EXPERTS:
        raise ValueError(f"{layers} layers of {count} experts; at most {_MOST_EXPERTS:,} experts in all")
    if not 1 < per_token <= count // groups * chosen or count % groups or chosen > groups:
        raise ValueError(
            f"{per_token} experts cannot be chosen from {chosen} of {groups} groups of {count} experts"
        )
    if groups > 1 and per_token != 2 * chosen:
        raise ValueError(
            f"num_experts_per_tok is {per_token} with topk_group {chosen}: Megatron supports two experts for "
            "each chosen group only"
        )
    router = SigmoidRouter(
        read_positive("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)), groups, chosen
    )
    return ExpertShape(
        count, per_token, size, True, tuple(range(dense, layers)), shared * size, False, router
    )

"""Model families: what all models of a Hugging Face architecture have in common.

A family is a row of ``FAMILIES``. Sizes are in config.json; ``model_config.py`` reads both into a
``ModelShape``, from which mappings, Megatron's modules, plan and audit follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """What config.json does not say, because the architecture implies it."""

    name: str
    models: str
    """Released models, as a user names them."""
    qkv_bias: bool = False
    """Query, key and value projections have biases."""
    qk_norm: Literal["no", "heads", "wide"] = "no"
    """Queries and keys are normalised: each head by itself, or all heads together."""
    by_key: tuple[str, ...] = ()
    """Of ``attention_bias`` and ``use_qk_norm`` those that say whether this model has the two above."""
    post_norm: bool = False
    """See ``ModelShape``; so has ``fused_rows``."""
    fused_rows: bool = False
    experts: bool = False
    shared_expert: bool = False
    """Layers with experts have one more, for all tokens, whose output a gate scales."""
    sigmoid_router: bool = False
    """Experts are chosen by sigmoid scores plus a bias, and the shared expert has no gate, with DeepSeek-V3's
    keys.
    """
    latent: bool = False
    """Attention is latent, with DeepSeek-V3's keys."""
    required: tuple[str, ...] = ()
    """Of ``fixed`` the keys without which vLLM would compute something else than transformers."""
    scales: bool = False
    """config.json has multipliers: of embedding, residual stream, attention scores and logits."""
    windows: Literal["no", "all", "some"] = "no"
    """Which layers have a sliding window if config.json has ``sliding_window``: all, or those that
    ``layer_types`` lists.
    """
    linear: bool = False
    """``layer_types`` may list layers with linear attention; the others' output is gated, and norms multiply
    by 1 + weight.
    """
    interleaved: bool = False
    """The input projections of linear attention have the rows of each key head together."""
    inside: str = ""
    """Of a released form with other parts, such as a vision tower: the model_type of its ``text_config``."""
    untrained: tuple[str, ...] = ()
    """How the names of tensors begin that are not trained; exports have them from ``model.path``. "next":
    those of the layers behind the last one, which predict further tokens.
    """
    ropes: tuple[str, ...] = ("default",)
    """Types of rotary embedding."""
    partial_rope: bool = False
    """``partial_rotary_factor`` counts."""
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the values that it may have besides null, which is refused beside true; none: false. With others
    vLLM would compute something else than transformers, or released models have no others.
    """
    defaults: dict[str, float] = field(default_factory=dict)
    """Values of keys that config.json may lack, where transformers' differ between families."""


_HYBRID: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "is_causal": (True,),
    **dict.fromkeys(("layer_scale", "qkv_bias"), ()),
}
_YARN = ("default", "yarn")
_ALL_EXPERTS: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""Of families that do not read these keys: all layers have experts."""

FAMILIES = {
    "LlamaForCausalLM": Family("llama", "Llama 2, 3 to 3.3", ropes=("default", "llama3")),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", qkv_bias=True, ropes=_YARN),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3", qk_norm="heads", ropes=_YARN, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", "Qwen3-MoE", qk_norm="heads", experts=True, ropes=_YARN),
    "MistralForCausalLM": Family("mistral", "Mistral", windows="all", defaults={"sliding_window": 4096}),
    "Phi3ForCausalLM": Family("phi3", "Phi-3 (4k), Phi-4", fused_rows=True, windows="all", partial_rope=True),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        "OLMo 3",
        qk_norm="wide",
        post_norm=True,
        windows="some",
        ropes=_YARN,
        defaults={"sliding_window": 4096, "rope_theta": 500000.0},
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "Granite 3",
        scales=True,
        fixed=dict.fromkeys(("layer_types", "layer_rope_theta", "attention_sinks", "logit_scale"), ()),
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5",
        "Qwen3.5 (its decoder alone)",
        qk_norm="heads",
        linear=True,
        ropes=_YARN,
        partial_rope=True,
        fixed=_HYBRID,
        defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        "OLMoE",
        qk_norm="wide",
        experts=True,
        fixed=_ALL_EXPERTS | {"clip_qkv": (), "rms_norm_eps": (1e-5,), "head_dim": ()},
        defaults={"num_experts": 64},
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "Qwen1.5-MoE, Qwen2-MoE",
        qkv_bias=True,
        experts=True,
        shared_expert=True,
        ropes=_YARN,
        fixed={"use_sliding_window": (), "qkv_bias": (True,), "head_dim": ()},
        defaults={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
}
"""Hugging Face's name of an architecture -> the family."""

FAMILIES["Glm4MoeForCausalLM"] = Family(
    "glm4_moe",
    "GLM-4.5, 4.6 and 4.7",
    qkv_bias=True,
    qk_norm="heads",
    by_key=("attention_bias", "use_qk_norm"),
    experts=True,
    sigmoid_router=True,
    partial_rope=True,
    untrained=("next",),
    fixed={"norm_topk_prob": (True,)},
    defaults={
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
)

FAMILIES["DeepseekV3ForCausalLM"] = Family(
    "deepseek_v3",
    "DeepSeek-V3, R1 and V3.1, Moonlight, Kimi-K2",
    experts=True,
    sigmoid_router=True,
    latent=True,
    untrained=("next",),
    ropes=("default", "yarn"),
    fixed={
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    required=("scoring_func", "topk_method"),
    defaults={
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
)
FAMILIES["Glm4MoeLiteForCausalLM"] = replace(
    FAMILIES["DeepseekV3ForCausalLM"],
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    ropes=("default",),
    # transformers has one dense layer, whatever this key says, and vLLM needs it.
    fixed=FAMILIES["DeepseekV3ForCausalLM"].fixed | {"first_k_dense_replace": (1,)},
    required=("first_k_dense_replace",),
    defaults={
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
    },
)

_MIXTURE = {
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "intermediate_size": 5632,  # of layers without experts, if any
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
FAMILIES["Qwen3NextForCausalLM"] = replace(
    FAMILIES["Qwen3_5ForCausalLM"],
    name="qwen3_next",
    models="Qwen3-Next",
    experts=True,
    shared_expert=True,
    interleaved=True,
    untrained=("mtp.",),
    defaults=FAMILIES["Qwen3_5ForCausalLM"].defaults | _MIXTURE,
)
FAMILIES["Qwen3_5MoeForCausalLM"] = replace(
    FAMILIES["Qwen3NextForCausalLM"],
    name="qwen3_5_moe",
    models="Qwen3.5 mixtures (their decoder alone)",
    interleaved=False,
    untrained=(),
    fixed=_HYBRID | _ALL_EXPERTS | {"norm_topk_prob": (True,)},
    defaults=FAMILIES["Qwen3NextForCausalLM"].defaults | {"num_experts_per_tok": 8, "num_experts": 256},
)
FAMILIES["Mistral3ForConditionalGeneration"] = replace(
    FAMILIES["MistralForCausalLM"],
    models="Mistral Small 3.1 and 3.2 (text)",
    inside="mistral",
    untrained=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "mtp.",
    ),
)

FAMILIES |= {
    f"{name}ForConditionalGeneration": replace(
        FAMILIES[f"{name}ForCausalLM"], models=models, inside=inside, untrained=("model.visual.", "mtp.")
    )
    for name, models, inside in (
        ("Qwen3_5", "Qwen3.5 (dense; text)", "qwen3_5_text"),
        ("Qwen3_5Moe", "Qwen3.5 (mixtures; text)", "qwen3_5_moe_text"),
    )
}

NOT_SUPPORTED = {
    "DeepseekV": "DeepSeek-V2, V3.2 and V4",
    "KimiK": "Kimi-K2.5 and K3",
    "GptOss": "gpt-oss",
    "Gemma": "Gemma",
    "GraniteMoe": "Granite 4, mixtures of Granite 3",
    "Mixtral": "Mixtral",
    "Ministral3": "Ministral 3",
    "Llama4": "Llama 4",
    "Olmo2": "OLMo 2",
}
"""How an architecture's name begins -> the models, as a user names them."""


def describe_supported() -> str:
    """The models that run, for messages."""
    return "; ".join(family.models for family in FAMILIES.values())

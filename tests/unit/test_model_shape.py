"""What is read from a config.json; a model that we would compute wrongly is refused at once.

Why: rope scaling, a sliding window or a bias that goes unnoticed gives plausible log-probs that are wrong,
and nothing downstream can tell. Not covered: that the families are computed right (tests/distributed).
"""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rpg_megatron.config import UserError, read_model_shape
from rpg_megatron.config.model_shape import (
    ExpertShape,
    LinearAttention,
    Llama3Rope,
    Rope,
    Scales,
    SigmoidRouter,
    Windows,
    YarnRope,
)
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.layer_specs import megatron_rotates
from rpg_megatron.policy.rotary import rotary_frequencies
from tests.support.tiny_models import FAMILIES, tiny_shape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
OLMO3 = {**LLAMA, "architectures": ["Olmo3ForCausalLM"]}
VISION = "Mistral3ForConditionalGeneration"
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"]}
QWEN3_5 = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 1]},
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}


def read(folder: Path, raw: dict[str, object]):
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_shape(folder)


def test_what_differs_between_families(tmp_path: Path) -> None:
    fields = [
        (s.family, s.qkv_bias, s.qk_norm, s.head_dim, s.rope.scaling)
        for s in (read(tmp_path, raw) for raw in (LLAMA, QWEN2, QWEN3, {**QWEN3, "head_dim": 16}))
    ]
    assert fields == [
        ("llama", False, False, 8, None),
        ("qwen2", True, False, 8, None),
        ("qwen3", False, True, 128, None),
        ("qwen3", False, True, 16, None),
    ]


EVERY, SOME = (0, 1, 2, 3), (0, 1, 2)


@pytest.mark.parametrize(
    ("raw", "rope", "windows"),
    [
        (MISTRAL, Rope(5e5), Windows(4096, EVERY, Rope(5e5))),
        (MISTRAL | {"sliding_window": 16}, Rope(5e5), Windows(16, EVERY, Rope(5e5))),
        (MISTRAL | {"sliding_window": None}, Rope(5e5), None),
        (PHI3, Rope(5e5), None),
        (PHI3 | {"partial_rotary_factor": 0.75}, Rope(5e5, 0.75), None),
        (PHI3 | {"sliding_window": 2047}, Rope(5e5), Windows(2047, EVERY, Rope(5e5))),
        (OLMO3, Rope(5e5), Windows(4096, SOME, Rope(5e5))),
        (
            OLMO3 | {"rope_theta": 2e5, "rope_scaling": YARN},  # only layers with full attention
            Rope(2e5, scaling=YarnRope(8.0, 32, 1, 512, 0.1 * math.log(8) + 1)),
            Windows(4096, SOME, Rope(5e5)),
        ),
        (
            OLMO3
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            Rope(1e4),
            Windows(4096, (1, 3), Rope(1e3)),
        ),
    ],
)
def test_windows_and_rotary_embeddings_are_read_as_transformers_does(
    tmp_path: Path, raw: dict[str, Any], rope: Rope, windows: Windows | None
) -> None:
    shape = read(tmp_path, raw)
    assert (shape.rope, shape.windows) == (rope, windows)
    kind = {"MistralForCausalLM": "mistral", "Phi3ForCausalLM": "phi3", "Olmo3ForCausalLM": "olmo3"}
    config = AutoConfig.for_model(kind[raw["architectures"][0]], **{**raw, "pad_token_id": None})
    kinds = getattr(config, "layer_types", None)
    for layer in range(4):
        window = config.sliding_window if not kinds or kinds[layer] == "sliding_attention" else None
        parameters = config.rope_parameters[kinds[layer]] if kinds else config.rope_parameters
        assert shape.window(layer) == window
        assert shape.rope_of(layer).theta == parameters["rope_theta"]
        assert shape.rope_of(layer).fraction == parameters.get("partial_rotary_factor", 1)
        assert isinstance(shape.rope_of(layer).scaling, YarnRope) == (parameters["rope_type"] == "yarn")


YARN_FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}
"""transformers' name of the architecture -> what config.json has besides the common keys."""


@pytest.mark.parametrize("kind", YARN_FAMILIES)
@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"rope_scaling": YARN}, 4096),
        ({"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in YARN.items()}}, 4096),
        ({"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.5, "truncate": True}}, 4096),
        ({"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 0.5, "type": "yarn"}}, 4096),
        ({"rope_scaling": YARN | {"factor": 4}}, 2048),
        ({"rope_scaling": YARN | {"factor": 1.001}}, 512),
        ({"rope_scaling": YARN | {"factor": 0.5, "attention_factor": None}}, 256),
        ({"rope_scaling": YARN | {"factor": 16.0}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4096),  # of max_position_embeddings
        ({"rope_scaling": YARN, "original_max_position_embeddings": 256}, 2048),
        ({"rope_scaling": YARN, "max_position_embeddings": 1024}, 1024),
    ],
)
def test_yarn_is_read_as_transformers_does(
    tmp_path: Path, kind: str, changes: dict[str, Any], positions: int
) -> None:
    name = "".join(part.capitalize() for part in kind.removesuffix("_text").split("_"))
    name = {"Qwen35": "Qwen3_5", "Qwen35Moe": "Qwen3_5Moe"}.get(name, name)
    raw = json.loads(json.dumps(LLAMA | YARN_FAMILIES[kind] | changes))
    shape = read(tmp_path, raw | {"architectures": [f"{name}ForCausalLM"]})
    config = AutoConfig.for_model(kind, **raw)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert isinstance(shape.rope.scaling, YarnRope)
    assert torch.equal(rotary_frequencies(shape.rope, shape.head_dim), frequencies)
    assert shape.rope.scaling.magnitude == magnitude
    assert shape.max_positions == positions
    assert not megatron_rotates(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": "4.0"}, "factor is 4.0; it must be a number greater than 0"),
        ({"factor": True}, "factor is True; it must be a number"),
        ({"factor": None}, "factor is None; it must be a number"),
        ({"factor": float("nan")}, "factor is nan; it must be a number"),
        ({"factor": float("inf")}, "factor is inf; it must be a number"),
        ({"factor": -4.0}, "factor is -4.0; it must be a number"),
        ({"factor": ...}, "the key 'factor' is missing"),
        ({"attention_factor": "1"}, "attention_factor is 1; it must be a number"),
        ({"attention_factor": False}, "attention_factor is False; it must be a number"),
        ({"attention_factor": -1.0}, "attention_factor is -1.0; it must be a number"),
        ({"beta_fast": None}, "beta_fast is None; it must be a number"),  # vLLM takes no default
        ({"beta_slow": 0}, "beta_slow is 0; it must be a number"),  # transformers takes its default
        ({"beta_fast": "32"}, "beta_fast is 32; it must be a number"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is None; it must be"),
        ({"original_max_position_embeddings": 512.0}, "original_max_position_embeddings is 512.0; it must"),
        ({"original_max_position_embeddings": True}, "original_max_position_embeddings is True; it must be"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; it must be"),
        ({"truncate": False}, "type yarn with {'truncate': False} is not supported"),
        (
            {"truncate": None},
            "type yarn with {'truncate': None} is not supported",
        ),  # transformers: false; vLLM, too
        ({"truncate": "false"}, "type yarn with {'truncate': 'false'} is not supported"),
        (
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            "type yarn with {'mscale': 1.0, 'mscale_all_dim'",
        ),
        ({"rope_dim": 4}, r"type yarn with {'rope_dim': 4} is not supported"),  # of vLLM alone
        ({"mrope_section": [2, 1, 1]}, r"type yarn with {'mrope_section': \[2, 1, 1\]} is not supported"),
        ({"attn_factor": 1.0}, r"type yarn with {'attn_factor': 1.0} is not supported"),
        ({"type": "linear"}, "rope_type and type differ, with which vLLM does not start"),
        ({"rope_type": "default", "type": "yarn"}, "rope_type and type differ"),
        ({"rope_type": None}, "rope type None is not supported for qwen3; known: default, yarn"),
        ({"rope_type": "linear"}, "rope type 'linear' is not supported for qwen3; known: default, yarn"),
        ({"rope_type": ["yarn"]}, r"rope type \['yarn'\] is not supported for qwen3"),
        ({"rope_theta": "1e6"}, "rope_theta is 1e6; it must be a number"),
        ({"x": {"y": 1}}, "blocks with settings beside them"),  # which readers take for a key
        ({"rope_type": "x" * 500}, r"rope type 'x{79}\.\.\. is not supported"),
        ({"rope_type": "default", "rope_dim": 4}, "rope_dim and use_fope are of vLLM alone"),
        ({"rope_type": "default", "use_fope": True}, "rope_dim and use_fope are of vLLM alone"),
    ],
)
def test_yarn_that_transformers_or_vllm_computes_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    scaling = {key: value for key, value in (YARN | changes).items() if value is not ...}
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UserError, match=message):
            read(tmp_path, QWEN3 | {key: scaling})


def test_yarn_of_qwen3_5_may_have_sections(tmp_path: Path) -> None:
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 1e7}
    plain = read(tmp_path, QWEN3_5 | {"rope_parameters": YARN | {"rope_theta": 1e7}})
    assert read(tmp_path, QWEN3_5 | {"rope_parameters": YARN | sections}) == plain


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"full_attention_interval": 2}, (0, 2)),
        ({"full_attention_interval": 2, "layer_types": ["full_attention", "linear_attention"] * 2}, (1, 3)),
        ({"layer_types": ["full_attention"] * 4}, None),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 24}, (0, 1, 2)),
        ({"linear_key_head_dim": 8, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5}, (0, 1, 2)),
        ({"head_dim": 16}, (0, 1, 2)),
    ],
)
def test_linear_attention_is_read_as_transformers_does(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    shape = read(tmp_path, QWEN3_5 | changes)
    config = AutoConfig.for_model("qwen3_5_text", **json.loads(json.dumps(QWEN3_5 | changes)))
    assert shape.zero_centred
    assert shape.gated_attention
    assert (shape.head_dim, shape.rope.theta) == (config.head_dim, 1e7)
    assert shape.rope.fraction == config.rope_parameters["partial_rotary_factor"]
    assert [shape.is_linear(n) for n in range(4)] == [
        kind == "linear_attention" for kind in config.layer_types
    ]
    if layers is None:
        assert shape.linear is None
        return
    assert shape.linear == LinearAttention(
        layers,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def test_cost_of_linear_attention() -> None:
    """Layers with linear attention have no pairs of tokens, and no keys; their states cost each token."""
    shape = tiny_shape("qwen3_5")  # one of four layers has softmax attention
    assert (shape.squares(100), shape.attended(100), shape.softmax_layers) == (2500, 100, 1)
    n, parts = 1000, shape.forward_flops(1, 0)
    assert shape.forward_flops(n, shape.squares(n)) == pytest.approx(parts * n + 2 * n * n * 8 * 6)
    assert parts == 2 * (sum(shape.matmul_parameters) + shape.state_products)
    # At this length the pairs take as long as everything else.
    length = shape.attention_length
    assert shape.forward_flops(0, shape.squares(length)) == pytest.approx(length * parts)
    # 8 value heads of 5, keys of 6: three products with the state, and 32 tokens on average within a chunk.
    assert shape.state_products == 3 * 8 * (3 * 6 * 5 + 32 * (3 * 6 + 2 * 5))
    tensors = mapping_for(shape).hf_tensors().items()
    vectors = ("embed_tokens", "conv1d")
    matrices = sum(math.prod(s) for n, s in tensors if len(s) > 1 and not any(v in n for v in vectors))
    assert sum(shape.matmul_parameters) == matrices


def test_what_megatron_rotates() -> None:
    """Elsewhere attention does it itself: a part of the head, several kinds of layers, a factor."""
    rotated = {name for name in FAMILIES if megatron_rotates(tiny_shape(name))}
    assert rotated == {"qwen3", "qwen2", "llama", "mistral", "granite"}


SCALES = {
    "embedding_multiplier": 3,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 4.0,
}


@pytest.mark.parametrize(
    ("raw", "scales"),
    [
        (GRANITE | SCALES, Scales(3.0, 0.5, 0.3, 0.25)),
        (GRANITE, Scales(attention=1.0)),  # not 1 / sqrt(head_dim)
        (LLAMA | SCALES, Scales()),
    ],
)
def test_multipliers_are_read_as_transformers_does(tmp_path, raw: dict[str, Any], scales: Scales) -> None:
    shape = read(tmp_path, raw)
    assert shape.scales == scales
    if shape.family == "granite":
        config = AutoConfig.for_model("granite", **raw)
        assert scales.embedding == config.embedding_multiplier
        assert scales.residual == config.residual_multiplier
        assert scales.attention == config.attention_multiplier
        assert scales.logits == 1 / config.logits_scaling


@pytest.mark.parametrize("cut", [None, 8])
def test_cost_of_windows(cut: int | None) -> None:
    shape = tiny_shape("olmo3" if cut else "qwen3")
    for n in (1, 8, 9, 100):
        seen = [[min(i + 1, shape.window(layer) or n) for i in range(n)] for layer in range(4)]
        assert shape.attended(n) == sum(layer[-1] for layer in seen) / 4
        pairs = sum(map(sum, seen)) / 4
        # n^2 stands for the n (n + 1) / 2 pairs of n tokens, and likewise in a window.
        diagonal = sum(min(n, shape.window(layer) or n) for layer in range(4)) / 4
        assert shape.squares(n) == pytest.approx(2 * pairs - diagonal)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ExpertShape(16, 4, 32, True, (0, 1, 2, 3, 4, 5))),
        ({"num_experts": None, "num_local_experts": 16}, ExpertShape(16, 4, 32, True, (0, 1, 2, 3, 4, 5))),
        ({"norm_topk_prob": None}, ExpertShape(16, 4, 32, False, (0, 1, 2, 3, 4, 5))),
        ({"decoder_sparse_step": 2}, ExpertShape(16, 4, 32, True, (1, 3, 5))),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 0]}, ExpertShape(16, 4, 32, True, (1, 5))),
        ({"num_experts_per_tok": 1, "norm_topk_prob": False}, ExpertShape(16, 1, 32, False, tuple(range(6)))),
    ],
)
def test_experts_are_read_as_transformers_does(
    tmp_path: Path, changes: dict[str, object], expected: ExpertShape
) -> None:
    raw = {key: value for key, value in (QWEN3_MOE | changes).items() if value is not None}
    shape = read(tmp_path, raw)
    assert (shape.family, shape.qk_norm, shape.head_dim, shape.experts) == ("qwen3_moe", True, 8, expected)
    assert [shape.has_experts(i) for i in range(6)] == [i in expected.layers for i in range(6)]
    assert shape.has_dense_layers == (len(expected.layers) < 6)


def mixture(name: str) -> dict[str, object]:
    """A config.json of sizes without those of experts."""
    linear = {"rope_theta": None} if name in ("Qwen3_5Moe", "Qwen3Next") else {}
    raw = {**LLAMA, "architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 6} | linear
    raw |= {"rms_norm_eps": 1e-5} if name == "Olmoe" else {}
    return {key: value for key, value in raw.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 12, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24},
        {"moe_intermediate_size": 40, "norm_topk_prob": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"norm_topk_prob": False},
    ],
    ids=["defaults", "sizes", "normalised", "dense layers", "not normalised"],
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3_5Moe", "qwen3_5_moe_text"),
        ("Qwen3Next", "qwen3_next"),
        ("Qwen2Moe", "qwen2_moe"),
        ("Olmoe", "olmoe"),
    ],
)
def test_mixtures_are_read_as_transformers_does(
    tmp_path: Path, name: str, kind: str, changes: dict[str, object]
) -> None:
    raw = mixture(name) | changes
    # These families do not read the keys; vLLM reads one of them.
    ignored = {"decoder_sparse_step", "mlp_only_layers"} if name in ("Qwen3_5Moe", "Olmoe") else set()
    if ignored & changes.keys() or (name == "Qwen3_5Moe" and changes == {"norm_topk_prob": False}):
        with pytest.raises(UserError, match=f"{next(iter(changes))}=.* is not supported for {kind[:11]}"):
            read(tmp_path, raw)
        return
    shape, config = read(tmp_path, raw), AutoConfig.for_model(kind, **json.loads(json.dumps(raw)))
    e = shape.experts
    assert (e.count, e.per_token) == (config.num_experts, config.num_experts_per_tok)
    assert e.normalised == getattr(config, "norm_topk_prob", True)
    if name == "Olmoe":
        assert (e.ffn_hidden_size, e.shared_ffn_hidden_size) == (config.intermediate_size, 0)
    else:
        assert e.ffn_hidden_size == config.moe_intermediate_size
        assert e.shared_ffn_hidden_size == config.shared_expert_intermediate_size
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", [])
    assert e.layers == tuple(i for i in range(6) if i not in dense and (i + 1) % step == 0)
    assert (shape.linear is not None) == shape.gated_attention == (name in ("Qwen3_5Moe", "Qwen3Next"))
    assert shape.linear is None or shape.linear.interleaved == (name == "Qwen3Next")
    assert (shape.qkv_bias, shape.wide_qk_norm) == (name == "Qwen2Moe", name == "Olmoe")


GLM = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 6,
    "attention_bias": True,
    "n_routed_experts": 16,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_qk_norm": True, "attention_bias": False, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 3},
        {"num_nextn_predict_layers": 2, "first_k_dense_replace": 0},
        {"num_nextn_predict_layers": 0, "partial_rotary_factor": 1.0},
    ],
)
def test_sigmoid_routers_are_read_as_transformers_does(tmp_path: Path, changes: dict[str, object]) -> None:
    shape, raw = read(tmp_path, GLM | changes), json.loads(json.dumps(GLM | changes))
    config = AutoConfig.for_model("glm4_moe", **raw)
    e = shape.experts
    assert (e.count, e.per_token, e.normalised) == (16, config.num_experts_per_tok, config.norm_topk_prob)
    assert e.shared_ffn_hidden_size == config.n_shared_experts * config.moe_intermediate_size
    assert not e.shared_gate
    assert e.layers == tuple(range(config.first_k_dense_replace, 6))
    assert e.router == SigmoidRouter(config.routed_scaling_factor, config.n_group, config.topk_group)
    assert (shape.qk_norm, shape.qkv_bias) == (config.use_qk_norm, config.attention_bias)
    assert shape.rope.fraction == config.rope_parameters["partial_rotary_factor"]
    assert shape.untrained == tuple(f"model.layers.{6 + n}." for n in range(config.num_mtp_layers))


MLA_YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {
    **{key: value for key, value in GLM.items() if key != "attention_bias"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 1e4,
    "head_dim": 4,  # as transformers writes it
}
FLASH = {**DEEPSEEK, "architectures": ["Glm4MoeLiteForCausalLM"], "scoring_func": None, "topk_method": None}
FLASH["first_k_dense_replace"] = 1


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("deepseek_v3", DEEPSEEK),
        ("deepseek_v3", DEEPSEEK | {"rope_scaling": MLA_YARN, "n_routed_experts": 16}),
        ("deepseek_v3", DEEPSEEK | {"rope_scaling": MLA_YARN | {"mscale": 0.7, "beta_fast": 1}}),
        ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
        ("glm4_moe_lite", FLASH),
        ("glm4_moe_lite", FLASH | {"mlp_layer_types": ["dense"] + ["sparse"] * 5, "num_experts_per_tok": 2}),
    ],
)
def test_latent_attention_is_read_as_transformers_does(tmp_path, kind: str, raw: dict[str, object]) -> None:
    shape = read(tmp_path, raw)
    config = AutoConfig.for_model(kind, **json.loads(json.dumps(raw)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).model
    attention, rotary = model.layers[0].self_attn, type(model.rotary_emb)(config)
    latent, e = shape.latent, shape.experts
    assert latent.query_rank == (config.q_lora_rank or 0)
    assert (latent.rank, latent.plain_dim, latent.rotated_dim, latent.value_dim) == (20, 8, 4, 10)
    assert (shape.head_dim, shape.num_kv_heads) == (attention.qk_head_dim, 6)
    assert (shape.scales.attention or shape.head_dim**-0.5) == pytest.approx(attention.scaling, rel=1e-12)
    magnitude = shape.rope.scaling.magnitude if isinstance(shape.rope.scaling, YarnRope) else 1.0
    assert magnitude == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert torch.equal(rotary_frequencies(shape.rope, latent.rotated_dim), rotary.inv_freq)
    assert e.router == SigmoidRouter(config.routed_scaling_factor, config.n_group, config.topk_group)
    sparse = [n for n, layer in enumerate(model.layers) if hasattr(layer.mlp, "experts")]
    assert (list(e.layers), e.per_token) == (sparse, config.num_experts_per_tok)
    assert shape.untrained == ("model.layers.6.",)


def test_cost_of_latent_attention(tmp_path: Path) -> None:
    """A token passes each matrix once, and each pair of tokens the dimensions of its key and of its value."""
    for changes in ({}, {"q_lora_rank": None}):
        shape = read(tmp_path, DEEPSEEK | {"first_k_dense_replace": 5} | changes)
        tensors = mapping_for(shape).hf_tensors().items()
        idle = [f"experts.{n}." for n in range(8, 16)]
        matrices = sum(
            math.prod(s)
            for n, s in tensors
            if len(s) > 1 and "embed_tokens" not in n and not any(f"mlp.{i}" in n for i in idle)
        )
        assert sum(shape.matmul_parameters) == matrices
        # Scores and sums of values: 2 x (12 + 10) a pair and head, half of the pairs.
        assert shape.forward_flops(0, 100 * 100) == pytest.approx(100 * 100 / 2 * 2 * (12 + 10) * 6 * 6)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": SCALING},
        {"rope_scaling": {"type": "llama3", **{k: v for k, v in SCALING.items() if k != "rope_type"}}},
        {"rope_parameters": {**SCALING, "rope_theta": 5e5}, "rope_theta": None},
        {
            "rope_scaling": {**SCALING, "original_max_position_embeddings": 1},
            "original_max_position_embeddings": 512,
        },
        {
            "rope_scaling": {k: v for k, v in SCALING.items() if not k.startswith("original")},
            "max_position_embeddings": 512,
        },
    ],
)
def test_every_spelling_of_llama3_rope_scaling(tmp_path: Path, spelling: dict[str, object]) -> None:
    shape = read(tmp_path, LLAMA | spelling)
    assert shape.rope.scaling == Llama3Rope(32.0, 1.0, 4.0, 512)
    assert shape.rope.theta == 5e5


def refused(base: dict[str, Any], *rows: tuple[dict[str, Any], str]) -> list[tuple[dict[str, Any], str]]:
    """What the base is with these changes, and the message."""
    return [(base | changes, message) for changes, message in rows]


REFUSED = refused(
    LLAMA,
    ({"attention_bias": True}, "attention_bias=true is not supported for llama"),
    ({"mlp_bias": True, "hidden_act": "gelu"}, "mlp_bias=true .*; hidden_act='gelu' .* known: silu"),
    ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' .* for llama; known: default, llama3"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ({"rope_scaling": {**SCALING, "high_freq_factor": 1.0}}, "low_freq_factor < high_freq_factor"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "the key 'factor' is missing"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config \('fp8' with \{\"weight_block_size\": null\}\): the trainer does not read",
    ),
    ({"quantization_config": {}}, "quantization_config .* give the model in bfloat16"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ({"architectures": ["x\n\nerror: y"]}, r"architecture 'x\\n\\nerror: y' is not supported"),
    (
        {"architectures": ["DeepseekV32ForCausalLM"]},
        r"DeepSeek-V2, V3.2 and V4 \(architecture DeepseekV32ForCausalLM\) is not supported; use one of: "
        "Llama 2, 3 to .*Mistral.*; CONTRIBUTING.md",
    ),
    ({"architectures": ["Foo"]}, "architecture Foo is not supported; use one of: Llama"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": SCALING}, "_scaling differ"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer of 1 to 65,536"),
    ({"hidden_size": -48}, "hidden_size is -48"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* 1 to 10,000"),
    ({"vocab_size": 2**40}, "vocab_size is"),
    ({"vocab_size": 53.5}, "vocab_size is 53.5"),
    ({"intermediate_size": "64"}, "intermediate_size is '64'"),
    ({"num_key_value_heads": True}, "num_key_value_heads is True"),
    ({"num_key_value_heads": 4}, "num_key_value_heads is 4, which does not divide num_attention_heads"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"max_position_embeddings": 2**31}, r"1 to 2,147,483,647"),
    ({"vocab_size": 2**31}, "vocab_size is 2147483648; .* 1 to 2,147,483,647"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be a number greater than 0"),
    ({"rope_scaling": {**SCALING, "factor": float("inf")}}, "rope scaling needs factor >= 1"),
    ({"rope_scaling": {**SCALING, "original_max_position_embeddings": -3}}, "max_position_embeddings is"),
    ({"rope_parameters": "abc"}, "config.json"),
    ({"architectures": {"a": 1}}, "architecture .not a list. is not supported"),
    ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
    ({"vocab_size": None}, "the key 'vocab_size' is missing"),
)
REFUSED += refused(
    QWEN3,
    (
        {"quantization_config": {"quant_method": "gptq"}},
        r"quantization_config \('gptq'\): the trainer does not read quantised weights[^;]*; give [^;]*$",
    ),
    ({"attention_bias": True}, "attention_bias=true is not supported for qwen3"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "2 of 4 layers have sliding_attention"),
)
REFUSED += refused(
    QWEN2,
    ({"rope_scaling": SCALING}, "rope type 'llama3' is not supported for qwen2; known: default"),
    (
        {"use_sliding_window": True, "max_window_layers": 3},
        "1 of 4 layers have sliding_attention; only full attention",
    ),
    (
        {"use_sliding_window": True, "max_window_layers": -3_000_000_000},
        "4 of 4 layers have sliding_attention; only full attention",
    ),  # a list of as many layers would take all memory
    (
        {"use_sliding_window": True, "num_hidden_layers": 29},
        "1 of 29 layers have sliding_attention",
    ),  # transformers' default: from layer 28 on
)
REFUSED += refused(
    PHI3,
    ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported for phi3"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be at most 1"),
)
REFUSED += refused(
    OLMO3,
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    ({"layer_types": ["linear_attention"] * 4}, "4 of 4 layers have linear_attention; this kind"),
    ({"rope_scaling": YARN | {"mscale": 1.0}}, "type yarn with {'mscale': 1.0} is not supported"),
    ({"rope_scaling": YARN | {"factor": 0}}, "factor is 0; it must be a number greater than 0"),
    ({"rope_scaling": YARN | {"attention_factor": 0}}, "^.*: attention_factor is 0; it must be"),
)
REFUSED += refused(
    {},
    (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
        r"text_config is of 'ministral3'; with this architecture only mistral \(Mistral Small 3",
    ),
    ({"architectures": [VISION]}, "text_config is of None"),
    (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": {**QWEN3_5, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
        },
        "tie_word_embeddings is True in text_config and None outside",
    ),
)
REFUSED += refused(
    QWEN3_5,
    ({"layer_types": ["linear_attention"] * 4}, "all layers have linear attention; at least"),
    ({"layer_types": ["sliding_attention"] * 4}, "4 of 4 layers have sliding_attention; this"),
    ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    ({"linear_num_key_heads": 3}, "linear_num_key_heads is 3, which does not divide .*32"),
    ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be an integer"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0; it must be an integer"),
    ({"linear_conv_kernel_dim": 1025}, "linear_conv_kernel_dim is 1025; .* 1 to 1,024"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, which vLLM does not support"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported for qwen3_5"),
    ({"is_causal": False}, "is_causal=False is not supported"),
    ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is for"),
    ({"layer_scale": True}, "layer_scale=True is not supported for qwen3_5"),
    ({"layer_types": 5}, "layer_types is 5; it must be a list of names"),
    ({"layer_types": [None] * 4}, r"layer_types is \[None.*; it must be a list of names"),
    ({"rope_parameters": "x"}, "rope_parameters is 'x'; it must be an object"),
    ({"attention_bias": True}, "attention_bias=true is not supported for qwen3_5"),
    ({"architectures": ["DeepseekV2ForCausalLM"]}, r"V4 \(arch"),
)
REFUSED += refused(
    GRANITE,
    ({"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported for granite"),
    ({"logits_scaling": 0}, "logits_scaling is 0; it must be a number greater than 0"),
    ({"attention_multiplier": None}, "attention_multiplier is None; it must be a number"),
    ({"attention_bias": True}, "attention_bias=true is not supported for granite"),
    ({"mlp_bias": True}, "mlp_bias=true is not supported"),
    ({"rope_scaling": SCALING}, "rope type 'llama3' is not supported for granite"),
    (
        {"architectures": ["GraniteMoeHybridForCausalLM"]},
        r"Granite 4, .*\(architecture GraniteMoeHybridForCausalLM\) is not supported; .*Granite 3;",
    ),
)
REFUSED += refused(
    MISTRAL,
    ({"sliding_window": 0}, "sliding_window is 0; it must be an integer of 1 to"),
)
REFUSED += refused(
    QWEN3_MOE,
    ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is for"),
    ({"num_local_experts": 8}, "num_experts is 16, but num_local_experts 8"),
    ({"num_experts_per_tok": 17}, r"num_experts_per_tok is 17, more than num_experts \(16\)"),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1 with norm_topk_prob true"),
    ({"num_experts": 0}, "num_experts is 0; it must be an integer of 1 to"),
    ({"num_experts": 2**16}, "6 layers of 65536 experts; at most"),
    ({"moe_intermediate_size": "a"}, "moe_intermediate_size is 'a'"),
    ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "leave no layer with experts"),
    ({"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
    ({"decoder_sparse_step": 7}, "leave no layer with experts"),
    ({"attention_bias": True}, "attention_bias=true is not supported for qwen3_moe"),
)
REFUSED += refused(
    mixture("Qwen2Moe"),
    ({"use_sliding_window": True}, "use_sliding_window=True is not supported for qwen2_moe"),
    ({"qkv_bias": False}, "qkv_bias=False is not supported .*; released models have true"),
)
REFUSED += refused(
    mixture("Olmoe"),
    ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for olmoe; released models have none"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported .*; released models have 1e-05"),
)
REFUSED += refused(
    mixture("Qwen3Next"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
)
REFUSED += refused(
    GLM,
    ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported for glm4_moe"),
    ({"n_group": 3}, "8 experts cannot be chosen from 1 of 3 groups of 16 experts"),
    ({"n_group": 4, "topk_group": 1}, "8 experts cannot be chosen from 1 of 4 groups of 16 experts"),
    ({"n_group": 4, "topk_group": 5}, "cannot be chosen from 5 of 4 groups"),
    ({"n_group": 2, "topk_group": 1}, "num_experts_per_tok is 8 with topk_group 1: Megatron supports"),
    ({"num_experts_per_tok": 1}, "1 experts cannot be chosen from 1 of 1 groups"),
    ({"first_k_dense_replace": 6}, "first_k_dense_replace is 6; it must be less than num_hidden_layers"),
    ({"first_k_dense_replace": True}, "first_k_dense_replace is True; it must be less than"),
    ({"first_k_dense_replace": -1}, r"first_k_dense_replace is -1; it .* \(6\), and 0 or more"),
    ({"num_nextn_predict_layers": False}, "num_nextn_predict_layers is False; it must be an integer"),
    ({"num_nextn_predict_layers": 0.0}, r"num_nextn_predict_layers is 0\.0; it must be an integer"),
    ({"num_nextn_predict_layers": []}, r"num_nextn_predict_layers is \[\]; it must be an integer"),
    ({"hidden_act": "x" * 500}, r"hidden_act='x{79}\.\.\. is not supported"),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be a number greater than 0"),
    ({"routed_scaling_factor": True}, "routed_scaling_factor is True; it must be a number greater"),
    ({"n_routed_experts": 2**16}, "6 layers of 65536 experts; at most"),
    ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers is 'x'; it must be an integer"),
)
REFUSED += refused(
    DEEPSEEK,
    ({"scoring_func": None}, 'scoring_func is missing, without which vLLM .* set it to "sigmoid"'),
    ({"topk_method": None}, 'topk_method is missing, without which vLLM .* set it to "noaux_tc"'),
    ({"topk_method": "greedy"}, "topk_method='greedy' is not supported for deepseek_v3; released"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ({"rope_interleave": False}, "rope_interleave=False is not supported"),
    (
        {"architectures": ["Glm4MoeLiteForCausalLM"], "rope_scaling": None, "first_k_dense_replace": 0},
        "first_k_dense_replace=0 is not supported for glm4_moe_lite",
    ),  # transformers has one dense layer
    (
        {"architectures": ["Glm4MoeLiteForCausalLM"], "rope_scaling": None},
        "first_k_dense_replace is missing, without which vLLM",
    ),
    ({"rope_interleave": None}, "rope_interleave=None is not supported"),  # transformers: false
    ({"norm_topk_prob": None}, "norm_topk_prob=None is not supported"),  # and vLLM, too
    ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
    ({"attention_bias": True}, "attention_bias=true is not supported for deepseek_v3"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2 of 6 heads"),
    ({"qk_rope_head_dim": 5}, "qk_rope_head_dim 5, .* an even number of rotated dimensions"),
    ({"v_head_dim": 13}, "v_head_dim 13 with keys of 12"),
    ({"kv_lora_rank": None}, "the key 'kv_lora_rank' is missing"),
    ({"q_lora_rank": 0}, "q_lora_rank is 0; it must be an integer of 1"),
    ({"q_lora_rank": True}, "q_lora_rank is True; it must be an integer of 1"),
    ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, r"mlp_layer_types and first_k.* \(3\) differ"),
    ({"rope_scaling": MLA_YARN | {"mscale": None}}, "mscale is None; it must be a number greater than 0"),
    ({"rope_scaling": MLA_YARN | {"mscale_all_dim": 0}}, "mscale_all_dim is 0; it must be a number"),
    ({"rope_scaling": MLA_YARN | {"attention_factor": 1.0}}, "with attention_factor is not supported"),
    ({"rope_scaling": MLA_YARN, "rope_theta": 1.0}, "rope_theta is 1 with YaRN; all frequencies"),
    ({"rope_scaling": MLA_YARN | {"type": "linear"}}, "rope type 'linear' is not supported for deepseek_v3"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
)


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_variants_and_sizes_that_are_not_covered_are_refused(
    tmp_path, raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, raw)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("raw", "key", "largest"),
    [
        (LLAMA, "num_hidden_layers", 10_000),
        (LLAMA, "hidden_size", 1_048_576),
        (LLAMA, "intermediate_size", 4_194_304),
        (LLAMA, "num_attention_heads", 65_536),
        (LLAMA, "num_key_value_heads", 65_536),
        (LLAMA, "head_dim", 65_536),
        (LLAMA, "vocab_size", 2_147_483_647),
        (LLAMA, "max_position_embeddings", 2_147_483_647),
        (MISTRAL, "sliding_window", 2_147_483_647),
        (QWEN3_5, "linear_num_key_heads", 65_536),
        (QWEN3_5, "linear_num_value_heads", 65_536),
        (QWEN3_5, "linear_key_head_dim", 65_536),
        (QWEN3_5, "linear_value_head_dim", 65_536),
        (QWEN3_5, "linear_conv_kernel_dim", 1_024),
        (QWEN3_5, "full_attention_interval", 10_000),
        (QWEN3_MOE, "num_experts", 65_536),
        (QWEN3_MOE | {"num_experts": 65_536}, "num_local_experts", 65_536),
        (QWEN3_MOE, "num_experts_per_tok", 65_536),
        (QWEN3_MOE, "moe_intermediate_size", 4_194_304),
        (QWEN3_MOE, "decoder_sparse_step", 10_000),
    ],
)
def test_the_largest_sizes(tmp_path: Path, raw: dict[str, object], key: str, largest: int) -> None:
    """What is larger is a damaged file, which would take hours, or all memory, before anything is said."""
    message = rf"{key} is {largest + 1}; it must be an integer of 1 to {largest:,}"
    with pytest.raises(UserError, match=message):
        read(tmp_path, raw | {key: largest + 1})


@pytest.mark.parametrize(
    ("raw", "key"),
    [(GRANITE, key) for key in ("layer_types", "layer_rope_theta", "attention_sinks", "logit_scale")]
    + [(QWEN3_5, key) for key in ("layer_scale", "qkv_bias")],
)
def test_keys_of_variants_that_a_family_refuses(tmp_path: Path, raw: dict[str, object], key: str) -> None:
    for value in [["full_attention"] * 4] if key == "layer_types" else (1.5, True):
        with pytest.raises(
            UserError, match=rf"{key}=.* is not supported for (granite|qwen3_5); released models have none"
        ):
            read(tmp_path, raw | {key: value})
    assert read(tmp_path, raw | {key: None}) == read(tmp_path, raw)


@pytest.mark.parametrize(
    ("raw", "works"),
    [
        (OLMO3 | {"rope_scaling": YARN | {"truncate": True}}, True),
        (OLMO3 | {"rope_scaling": YARN | {"truncate": False}}, False),
        (OLMO3 | {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, False),
        (LLAMA | {"rope_scaling": SCALING | {"factor": 1.0}}, True),
        (LLAMA | {"rope_scaling": SCALING | {"factor": 0.9}}, False),
        (LLAMA | {"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, False),  # as high_freq_factor
        (LLAMA | {"rope_scaling": SCALING | {"low_freq_factor": 0}}, False),
        (PHI3 | {"partial_rotary_factor": 1}, True),
        (QWEN3_MOE | {"num_experts_per_tok": 16}, True),  # all of them
        (QWEN3_MOE | {"num_experts": 21_845}, True),  # 131,070 in 6 layers
        (QWEN3_MOE | {"num_experts": 21_846}, False),  # 131,076, more than 2^17
        (QWEN3_MOE | {"decoder_sparse_step": 6}, True),  # the last layer
        (QWEN3_5 | {"linear_conv_kernel_dim": 2}, True),
        (QWEN3_5 | {"output_gate_type": "swish"}, True),
        (QWEN3_5 | {"full_attention_interval": 4}, True),
        (QWEN3_5 | {"full_attention_interval": 5}, False),  # of 4 layers none would have attention
    ],
)
def test_values_on_both_sides_of_a_bound(tmp_path: Path, raw: dict[str, object], works: bool) -> None:
    with nullcontext() if works else pytest.raises(UserError, match=r"config\.json"):
        read(tmp_path, raw)


@pytest.mark.parametrize("raw", [LLAMA, QWEN2, QWEN3, QWEN3_MOE, GRANITE])
@pytest.mark.parametrize(("value", "tied"), [(True, True), (False, False), (None, False), ("absent", False)])
def test_tied_embeddings_are_read_as_transformers_does(
    tmp_path: Path, raw: dict[str, object], value: object, tied: bool
) -> None:
    from transformers import CONFIG_MAPPING

    key = {} if value == "absent" else {"tie_word_embeddings": value}
    shape = read(tmp_path, raw | key)
    theirs = CONFIG_MAPPING[shape.family](**key if value is not None else {})
    assert shape.tied_embeddings == theirs.tie_word_embeddings == tied


def test_a_quantisation_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UserError, match=r"hf_quant_config\.json beside it: the trainer does not read"):
        read(tmp_path, LLAMA)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_a_file_that_no_reader_can_take_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        UserError, match=r"config\.json: not valid JSON \((nested too deeply|.*many digits)\)"
    ):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        QWEN2,
        QWEN2 | {"attention_bias": True},  # transformers does not look at it
        QWEN2 | {"use_sliding_window": True, "sliding_window": None},
        QWEN2 | {"use_sliding_window": True},  # from layer 28 on, and there are 4
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(tmp_path: Path, raw: dict[str, object]) -> None:
    assert read(tmp_path, raw).family == "qwen2"


@pytest.mark.parametrize("start", ["", "model."])
@pytest.mark.parametrize("part", ["vision_tower.", "multi_modal_projector."])
def test_parts_of_mistral_small_are_known_by_older_and_newer_names(tmp_path, start: str, part: str) -> None:
    text = MISTRAL | {"model_type": "mistral"}
    shape = read(tmp_path, {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert f"{start}{part}weight".startswith(shape.untrained)
    assert not f"{start}language_model.layers.0.weight".startswith(shape.untrained)

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
import yaml
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

DATA = yaml.safe_load((Path(__file__).parents[1] / "data" / "refused_models.yaml").read_text("utf-8"))
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


LONG_TYPE = ({"rope_type": "x" * 500}, r"rope type 'x{79}\.\.\. is not supported")


@pytest.mark.parametrize(
    ("changes", "message"), [*DATA["yarn"], ({"factor": ...}, "the key 'factor' is missing"), LONG_TYPE]
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


def test_pairs_of_tokens_cost_as_much_as_all_else() -> None:
    shape = tiny_shape()
    length = shape.attention_length
    assert shape.forward_flops(0, shape.squares(length)) == pytest.approx(shape.forward_flops(length, 0))


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


BASES = {
    **{"LLAMA": LLAMA, "QWEN2": QWEN2, "QWEN3": QWEN3, "QWEN3_MOE": QWEN3_MOE, "MISTRAL": MISTRAL},
    **{"PHI3": PHI3, "OLMO3": OLMO3, "GRANITE": GRANITE, "QWEN3_5": QWEN3_5, "GLM": GLM},
    **{"DEEPSEEK": DEEPSEEK, "NONE": {}},
    **{name: mixture(name) for name in ("Qwen2Moe", "Olmoe", "Qwen3Next")},
}
TIED_ONCE = QWEN3_5 | {"model_type": "qwen3_5_text", "tie_word_embeddings": True}
REFUSED = [(BASES[name] | changes, message) for name in BASES for changes, message in DATA[name]] + [
    (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TIED_ONCE},
        "tie_word_embeddings is True in text_config and None outside",
    ),
    (GLM | {"hidden_act": "x" * 500}, r"hidden_act='x{79}\.\.\. is not supported"),
]


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

"""Tiny random models: a config.json per family, one writer of checkpoints, and transformers' own models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file as save_arrays
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rpg_megatron.config import read_model_shape
from rpg_megatron.config.model_shape import (
    ExpertShape,
    LinearAttention,
    Llama3Rope,
    ModelShape,
    Rope,
    Scales,
    Windows,
    YarnRope,
)
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.registry import mapping_for

if TYPE_CHECKING:  # transformers takes seconds to import, and few tests need it
    import torch
    from transformers import PreTrainedModel

_COMMON = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "dtype": "float32",
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 256,
}
_LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
_HYBRID = {
    **{key: value for key, value in _COMMON.items() if key != "rope_theta"},
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": False,
        **_COMMON,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_COMMON},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_COMMON,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **_COMMON,
        "sliding_window": 16,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **_COMMON,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **_COMMON,
        "sliding_window": 16,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "mlp_bias": False,
        **_COMMON,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_HYBRID,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **_HYBRID,
        **_MIXTURE,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_HYBRID,
        **_MIXTURE,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **_COMMON,
        **_MIXTURE,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **{key: value for key, value in _COMMON.items() if key != "rope_theta"},
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: value for key, value in _COMMON.items() if key not in ("rope_theta", "num_key_value_heads")},
        **_LATENT,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **{key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
        **_LATENT,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        **_COMMON,
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        **_COMMON,
    },
}
"""Family -> config.json; Moonlight is deepseek_v3 with ``MOONLIGHT``."""
MOONLIGHT: dict[str, Any] = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with linear attention, whose other norms multiply by 1 + weight."""
AWKWARD = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
"""Sizes that no pipeline (layers) and no tensor parallelism (vocabulary) divides."""
WIDE = {"hidden_size": 96, "num_attention_heads": 12}
"""On top of AWKWARD: 12 query heads in 2 groups, for more tensor ranks than groups."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 128,
}
"""Wavelengths are 6, 30, 140 and 664 tokens at a head of 8: under 16 they stay, over 64 they grow."""

TINY = ModelShape(
    family="qwen3",
    num_layers=4,
    hidden_size=24,
    ffn_hidden_size=40,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    vocab_size=53,
    tied_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    rope=Rope(1e6),
    norm_eps=1e-6,
    max_positions=512,
    dtype="float32",
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "llama": {
        "family": "llama",
        "qk_norm": False,
        "rope": Rope(1e6, scaling=Llama3Rope(8.0, 1.0, 4.0, 64)),
    },
    "mistral": {"family": "mistral", "qk_norm": False, "windows": Windows(8, (0, 1, 2, 3), Rope(1e6))},
    "phi3": {"family": "phi3", "qk_norm": False, "fused_rows": True, "rope": Rope(1e6, 2 / 3)},
    "olmo3": {
        "family": "olmo3",
        "wide_qk_norm": True,
        "post_norm": True,
        "windows": Windows(8, (0, 1, 2), Rope(1e5)),
        "rope": Rope(1e6, scaling=YarnRope(8.0, 32.0, 1.0, 64, 1.2)),
    },
    "qwen3_5": {
        "family": "qwen3_5",
        "rope": Rope(1e6, 1 / 3),
        "zero_centred": True,
        "gated_attention": True,
        "linear": LinearAttention((0, 1, 3), 4, 8, 6, 5, 3),
    },
    "qwen3_5_moe": {
        "family": "qwen3_5_moe",
        "rope": Rope(1e6, 1 / 3),
        "zero_centred": True,
        "gated_attention": True,
        "linear": LinearAttention((0, 1, 3), 4, 8, 6, 5, 3),
        "experts": ExpertShape(4, 2, 24, True, (0, 1, 2, 3), 16),
    },
    "qwen3_next": {
        "family": "qwen3_next",
        "rope": Rope(1e6, 1 / 3),
        "zero_centred": True,
        "gated_attention": True,
        "linear": LinearAttention((0, 1, 3), 4, 8, 6, 5, 3, True),
        "experts": ExpertShape(4, 2, 24, True, (1, 3), 16),
        "untrained": ("mtp.",),
    },
    "granite": {"family": "granite", "qk_norm": False, "scales": Scales(3.0, 0.5, 0.3, 1 / 4.0)},
}
"""What differs from TINY in each family."""
TINY_MOE = replace(TINY, family="qwen3_moe", experts=ExpertShape(8, 2, 24, True, (1, 2, 3)))
"""A mixture of experts whose first layer is dense."""


def tiny_shape(family: str = "qwen3", **changes: Any) -> ModelShape:
    return replace(TINY, **{**FAMILIES[family], **changes})


def rope_settings(rope: Rope) -> dict[str, Any]:
    """``rope_parameters`` of a config.json."""
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.fraction != 1:
        out["partial_rotary_factor"] = rope.fraction
    if isinstance(scaling := rope.scaling, Llama3Rope):
        out |= {"rope_type": "llama3", "low_freq_factor": scaling.low_freq_factor}
        out |= {"high_freq_factor": scaling.high_freq_factor}
    if isinstance(scaling, YarnRope):
        out |= {"rope_type": "yarn", "beta_fast": scaling.fast, "beta_slow": scaling.slow}
        out |= {"attention_factor": scaling.magnitude}
    if scaling is not None:
        out |= {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_positions}
    return out


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a shape."""
    config = {k: v for k, v in CONFIGS[shape.family].items() if k not in ("dtype", "rope_theta")} | {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "rope_parameters": rope_settings(shape.rope),
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "torch_dtype": shape.dtype,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if (experts := shape.experts) is not None:
        config |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.ffn_hidden_size,
            "norm_topk_prob": experts.normalised,
            "mlp_only_layers": [layer for layer in range(shape.num_layers) if layer not in experts.layers],
        }
        if experts.shared_ffn_hidden_size:
            config["shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
    if (linear := shape.linear) is not None:
        sizes = linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel
        keys = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
        config |= {f"linear_{key}": size for key, size in zip(keys, sizes, strict=True)}
        kinds = {True: "linear_attention", False: "full_attention"}
        config["layer_types"] = [kinds[n in linear.layers] for n in range(shape.num_layers)]
    if (windows := shape.windows) is not None:
        config["sliding_window"] = windows.tokens
        if shape.family == "olmo3":
            kinds = {True: "sliding_attention", False: "full_attention"}
            config["layer_types"] = [kinds[n in windows.layers] for n in range(shape.num_layers)]
            ropes = {True: windows.rope, False: shape.rope}
            config["rope_parameters"] = {kinds[of]: rope_settings(rope) for of, rope in ropes.items()}
    return config


def random_state_dict(
    layout: ModelMapping, dtype: torch.dtype | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Normal values of variance 1 under the HF names; float32 if no dtype is given."""
    import torch

    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g).to(dtype or torch.float32) for n, s in layout.hf_tensors().items()}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any] | ModelShape, weights: Mapping[str, Any], *, files: int = 1
) -> Path:
    """A HF checkpoint of tensors or arrays in one or several files, with a stand-in for the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    described = config_of(config) if isinstance(config, ModelShape) else config
    (folder / "config.json").write_text(json.dumps(described))
    arrays = all(isinstance(w, np.ndarray) for w in weights.values())
    if arrays:
        save = save_arrays
    else:
        from safetensors.torch import save_file as save
    if files == 1:
        save(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for i in range(files):
            file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
            part = {n: weights[n] for n in list(weights)[i::files]}
            save(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b\n")
    return folder


def write_byte_model(folder: Path, seed: int = 0, family: str = "qwen3", **changes: object) -> Path:
    """A random model with a byte-level tokenizer that works; ``changes`` go into its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.08, shape).astype(np.float32)
        for name, shape in mapping_for(read_model_shape(folder)).hf_tensors().items()
    }
    write_checkpoint(folder, CONFIGS[family] | changes, weights)
    (folder / "merges.txt").unlink()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def write_vision_model(folder: Path, family: str = "mistral") -> dict[str, Any]:
    """A random Mistral Small 3 or Qwen3.5 in its released form: a vision tower, a tensor of a head that
    predicts several tokens, in several files, of Mistral under older names, packed experts; beside them a
    working tokenizer. Returns all tensors.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    )

    write_byte_model(folder, family=family, num_attention_heads=2)
    text = json.loads((folder / "config.json").read_text())
    decoder = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    if family == "mistral":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16, **sizes}
        outside = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False}
        config = Mistral3Config(vision_config=vision, text_config=text, image_token_index=10, **outside)
        Mistral3ForConditionalGeneration(config).save_pretrained(folder)
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        if family == "qwen3_5":
            hybrid = Qwen3_5Config(vision_config=sizes, text_config=text, tie_word_embeddings=False)
            Qwen3_5ForConditionalGeneration(hybrid).save_pretrained(folder)
        else:
            mixture = Qwen3_5MoeConfig(vision_config=sizes, text_config=text, tie_word_embeddings=False)
            Qwen3_5MoeForConditionalGeneration(mixture).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = {name: re.sub(r"^model\.", "model.language_model.", name) for name in decoder}
    if family == "mistral":
        names = {name: f"language_model.{name}" for name in decoder}
    assert set(names.values()) <= set(tensors)
    tensors |= {names[name]: weight for name, weight in decoder.items()}
    tensors["mtp.fc.weight"] = torch.randn(4, 4).bfloat16()
    (folder / "model.safetensors").unlink()
    described, tokenizer = (folder / "config.json").read_bytes(), (folder / "tokenizer.json").read_bytes()
    write_checkpoint(folder, {}, tensors, files=3)
    (folder / "merges.txt").unlink()
    (folder / "config.json").write_bytes(described)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return pack_experts(folder) if family == "qwen3_5_moe" else tensors


def pack_experts(folder: Path) -> dict[str, Any]:
    """Rewrite a checkpoint, in one file or several, with the experts of each layer in two tensors, as
    Qwen3.5 is released. Returns its tensors.
    """
    import torch
    from safetensors.torch import load_file, save_file

    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    experts = sorted({n.partition(".experts.")[0] for n in tensors if ".experts." in n})
    for block in experts:
        count = len(
            {n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(f"{block}.experts.")}
        )
        parts = [
            [tensors.pop(f"{block}.experts.{e}.{x}_proj.weight") for e in range(count)]
            for x in ("gate", "up", "down")
        ]
        tensors[f"{block}.experts.gate_up_proj"] = torch.cat([torch.stack(part) for part in parts[:2]], 1)
        tensors[f"{block}.experts.down_proj"] = torch.stack(parts[2])
    for file in [*files, folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    if len(files) == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    weight_map = {}
    for i, file in enumerate(files):
        part = {n: tensors[n] for n in list(tensors)[i :: len(files)]}
        save_file(part, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def delta_rule_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule as the paper defines it, in place of transformers': output and last state."""
    import torch

    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, out = query.new_zeros(value.size(0), value.size(2), key.size(3), value.size(3)), []
    for q, k, v, decay, rate in zip(*(x.unbind(1) for x in (query, key, value, g, beta)), strict=True):
        state = state * decay.exp()[..., None, None]
        new = (v - (k[..., None, :] @ state)[..., 0, :]) * rate[..., None]
        state = state + k[..., None] * new[..., None, :]
        out.append((q[..., None, :] @ state)[..., 0, :] * k.size(-1) ** -0.5)
    return torch.stack(out, 1), state.detach()


@contextmanager
def use_float64() -> Iterator[None]:
    """Within the block, what transformers computes in float32 for every model is computed as the model is.

    Of mixtures norms and routers, which would choose by rounded numbers; of hybrids norms, decay rates, and
    the gated delta rule, then token by token, as the paper defines it.
    """
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
    from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
    from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
    from transformers.models.olmoe import modeling_olmoe as olmoe
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
    from transformers.models.qwen3_5 import modeling_qwen3_5 as hybrid
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        scale: torch.Tensor = self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        return scale

    def route(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.t()
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):  # Qwen3.5's always does
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def route_by_sigmoid(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.t()
        scores = logits.sigmoid()
        biased = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_group, -1))
        best = biased.topk(2, dim=-1)[0].sum(-1).topk(self.topk_group, dim=-1)[1]
        out = torch.ones_like(biased, dtype=torch.bool).scatter(
            1, best[..., None].expand(*best.shape, biased.size(-1)), False
        )
        chosen = biased.masked_fill(out, -torch.inf).flatten(1).topk(self.top_k, dim=-1)[1]
        weights = scores.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, chosen

    def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = norm(self, x) * torch.nn.functional.silu(gate)
        return scaled

    to_float32 = torch.Tensor.float

    def keep(self: torch.Tensor) -> torch.Tensor:
        return self if self.dtype is torch.float64 else to_float32(self)

    changes: list[tuple[Any, str, Any]] = [
        (qwen3_moe.Qwen3MoeRMSNorm, "forward", norm),
        (qwen2_moe.Qwen2MoeRMSNorm, "forward", norm),
        (olmoe.OlmoeRMSNorm, "forward", norm),
        (qwen3_moe.Qwen3MoeTopKRouter, "forward", route),
        (qwen2_moe.Qwen2MoeTopKRouter, "forward", route),
        (olmoe.OlmoeTopKRouter, "forward", route),
        (glm4_moe.Glm4MoeRMSNorm, "forward", norm),
        (glm4_moe.Glm4MoeTopkRouter, "forward", route_by_sigmoid),
        (deepseek_v3.DeepseekV3RMSNorm, "forward", norm),
        (deepseek_v3.DeepseekV3TopkRouter, "forward", route_by_sigmoid),
        (glm4_moe_lite.Glm4MoeLiteRMSNorm, "forward", norm),
        (glm4_moe_lite.Glm4MoeLiteTopkRouter, "forward", route_by_sigmoid),
        (qwen3_5_moe.Qwen3_5MoeTopKRouter, "forward", route),
        (qwen3_next.Qwen3NextTopKRouter, "forward", route),
        (hybrid.Qwen3_5RMSNormGated, "forward", gated_norm),
        (qwen3_5_moe.Qwen3_5MoeRMSNormGated, "forward", gated_norm),
        (qwen3_next.Qwen3NextRMSNormGated, "forward", gated_norm),
        *(
            (m, "torch_chunk_gated_delta_rule", delta_rule_by_token)
            for m in (hybrid, qwen3_5_moe, qwen3_next)
        ),
        (torch.Tensor, "float", keep),
    ]
    with ExitStack() as stack:
        for where, name, value in changes:
            stack.enter_context(patch.object(where, name, value))
        yield


def make_model(
    folder: Path, family: str = "qwen3", *, noise: float = 0.1, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Transformers' own model with random weights, written by transformers; returned in float64.

    Norms are not ones and biases not zeros. ``noise``: deviation of the other weights. ``changes`` go into
    the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[family] | {"eos_token_id": None, "pad_token_id": None} | changes
    kind = config.pop("model_type")
    if "rope_parameters" in changes:
        config.pop("rope_theta", None)
    dtype = getattr(torch, config.pop("dtype"))
    if not family.startswith("qwen3") and "head_dim" not in changes:
        config.pop("head_dim", None)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):
                values -= 2  # states that last for some tokens
            elif "norm" in name:  # centred around 0 or around 1
                values = 0.2 * values + (0 if family in HYBRIDS and "linear_attn" not in name else 1)
            else:
                # Short queries and keys, or states, would be noise that norms amplify, in any program.
                size = {"bias": 0.5, "conv1d": 1.0, "in_proj_qkv": 6 * noise}
                values *= next((value for part, value in size.items() if part in name), noise)
            p.copy_(values)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    model.to(dtype)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:  # as in released checkpoints
        if name.endswith(("A_log", "linear_attn.norm.weight", "e_score_correction_bias")):
            p.data = p.data.float()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if "num_experts_per_tok" in config:
        model.set_experts_implementation("eager")  # the default, a grouped product, does not take float64
    return model.double().eval()

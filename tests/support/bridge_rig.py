"""Engines of tiny models, their trainers, and requests to both, for the tests of the live bridge."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.engine.client import EngineClient, Sample
from rpg_megatron.models.lora import AdapterMapping
from tests.support import one_switch
from tests.support.bridge_trainers import PublishingRanks, start_trainers, state_dict
from tests.support.engine import Engine, running_engines
from tests.support.ranks import run_ranks

PROMPT = [3 + 7 * i % 90 for i in range(40)]
COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,  # responses end at their limit
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}
"""Responses of the bridge's tests have up to 600 tokens."""
SECTIONS = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 40,
}


LATENT: dict[str, Any] = {
    **COMMON | {"num_key_value_heads": 6},
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "scoring_func": "sigmoid",  # vLLM reads these two, which transformers does not write
    "topk_method": "noaux_tc",
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def hybrid(key_dim: int, value_dim: int, **more: Any) -> dict[str, Any]:
    """Three layers of four with gated delta nets, which have two heads of keys and four of values."""
    return {
        **COMMON,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "tie_word_embeddings": False,
        **more,
    }


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False)),
    "qwen3, YaRN": lambda: Qwen3ForCausalLM(
        Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False, rope_parameters=YARN)
    ),
    "qwen3, as many key heads": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON | {"num_key_value_heads": 6},
            head_dim=32,
            tie_word_embeddings=False,
            attention_bias=False,
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    ),
    "llama 3, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, head_dim=32, sliding_window=16, tie_word_embeddings=False)
    ),
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(
            **COMMON,
            pad_token_id=None,
            sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            tie_word_embeddings=False,
        )
    ),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(
            **COMMON,
            pad_token_id=None,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            tie_word_embeddings=False,
        )
    ),
    "granite, tied": lambda: GraniteForCausalLM(
        GraniteConfig(
            **COMMON,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
            logits_scaling=4.0,
            tie_word_embeddings=True,
        )
    ),
    "qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid(32, 48))),
    "qwen3.5, YaRN": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**hybrid(32, 48, rope_parameters=YARN | SECTIONS))
    ),
    "qwen3.5, heads of 128": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid(128, 128))),
    "qwen3.5-moe, heads of 128": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**hybrid(128, 128, **MIXTURE))
    ),
    "qwen3.5-moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**hybrid(32, 48, **MIXTURE))),
    "qwen3-next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**hybrid(32, 48, **MIXTURE), mlp_only_layers=[1])
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**COMMON, **MIXTURE, tie_word_embeddings=False)),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(
            **COMMON,
            num_experts=8,
            num_experts_per_tok=2,
            rms_norm_eps=1e-5,  # the only one in vLLM
            pad_token_id=None,
            tie_word_embeddings=False,
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **COMMON | {"intermediate_size": 128},
            head_dim=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=16,
            tie_word_embeddings=False,
        )
    ),
    "glm-4.5": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **COMMON,
            head_dim=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            use_qk_norm=True,
            attention_bias=True,
            tie_word_embeddings=False,
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**DEEPSEEK | {"n_group": 2}, rope_parameters=LATENT_YARN)
    ),
    "moonlight": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2},
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        )
    ),
    "glm-4.7-flash": lambda: Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**LATENT)),
}


def make_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a random model whose norms are not ones and whose biases are not zeros."""
    torch.manual_seed(0)
    model = MODELS[name]().float()
    model.config.dtype = dtype
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or key.endswith(("bias", "conv1d.weight")):
                p.add_(0.2 * torch.randn_like(p))
            elif key.endswith("A_log"):  # states that last for some tokens
                p.copy_(torch.randn_like(p) - 2)
            elif key.endswith("in_proj_qkv.weight"):  # norms would amplify the noise of short ones
                p.mul_(3)
            if not key.endswith("A_log"):  # always float32
                p.data = p.data.to(dtype)
        for key, bias in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                bias.add_(0.2 * torch.randn_like(bias))
    model.save_pretrained(folder)
    if model.config.tie_word_embeddings:  # some checkpoints have the tied tensor twice
        file = folder / "model.safetensors"
        tensors = load_file(file)
        again = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tensors | again, file, metadata={"format": "pt"})


def write_released(
    name: str, folder: Path, decoder: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Write a Qwen3.5 with these weights in its released form: with a vision tower, a tensor of a head that
    predicts several tokens, and all experts of a layer in two tensors.
    """
    make_model(name, folder, dtype)
    text = AutoConfig.from_pretrained(folder)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": text.hidden_size, "num_position_embeddings": 16}
    mixture = isinstance(text, Qwen3_5MoeTextConfig)
    described, kind = (
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
        if mixture
        else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    )
    config = described(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    model = kind(config).to(dtype)
    config.architectures, config.dtype = [kind.__name__], dtype
    config.save_pretrained(folder)
    weights = pack_experts(decoder) if mixture else decoder
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in weights.items()}
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    assert renamed.keys() == {key for key in tensors if "visual" not in key}
    tensors |= renamed | {"mtp.fc.weight": torch.randn(4, 4).to(dtype)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the experts of each layer in two tensors, as Qwen3.5 is released."""
    out = dict(weights)
    for block in sorted({name.partition(".experts.0.")[0] for name in weights if ".experts.0." in name}):
        count = sum(name.startswith(f"{block}.experts.") for name in weights) // 3
        parts = {
            part: torch.stack([out.pop(f"{block}.experts.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        }
        out[f"{block}.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        out[f"{block}.experts.down_proj"] = parts["down"]
    return out


def settings_for(model: Path, engine_tensor: int) -> dict[str, Any]:
    """Settings of a run as a dictionary, for ranks that add their layout."""
    return {
        "device": "cpu",
        "model": {"path": str(model), "vocab_multiple": 4},
        "data": {"path": "unused", "max_prompt_tokens": 32},
        "precision": {"dtype": "float32"},
        "optimizer": {"distributed": False},
        "rollout": {"prompts_per_step": 16, "temperature": 1.0, "max_response_tokens": 600},
        "engine": {
            "tensor": engine_tensor,
            "max_sequences": 8,
            "kv_cache_gib": 0.25,
            "cpu_threads": 1,
            "arguments": ["--skip-tokenizer-init"],  # there is none; requests are tokens
        },
    }


def hf_logprobs(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Transformers' log-probs of the fixed prompt."""
    return logprobs_of(folder, weights, [PROMPT])[0]


def logprobs_of(
    folder: Path, weights: dict[str, torch.Tensor], texts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Transformers' log-probs of the tokens of texts, but for the first of each."""
    config = AutoConfig.from_pretrained(folder)
    config = config.text_config if hasattr(config, "vision_config") else config
    kind = getattr(transformers, config.architectures[0])
    # By the names in files, which differ from those in memory for some experts.
    model = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0, :-1].log_softmax(-1) for text in texts]
    return [x.gather(-1, torch.tensor(text)[1:, None])[:, 0] for x, text in zip(logits, texts, strict=True)]


async def ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *tokens: int,
    experts: ExpertShape | None = None,
    **options: Any,
) -> list[Sample]:
    """A response to each prompt, all at once. tokens: their lengths, in turn. experts: to have routes."""
    client = EngineClient(0, engine.process.socket, engine.token, timeout=300, experts=experts)
    try:
        groups = await asyncio.gather(
            *[
                client.generate(p, max_tokens=tokens[i % len(tokens)], temperature=1.0, seed=i, **options)
                for i, p in enumerate(prompts)
            ]
        )
        return [group[0] for group in groups]
    finally:
        await client.close()


def gaps(
    model: Path, weights: dict[str, torch.Tensor], prompts: Sequence[Sequence[int]], samples: Sequence[Sample]
) -> torch.Tensor:
    """Differences of the responses' log-probs to transformers'."""
    texts = [[*prompt, *sample.tokens.tolist()] for prompt, sample in zip(prompts, samples, strict=True)]
    parts = zip(logprobs_of(model, weights, texts), prompts, samples, strict=True)
    return torch.cat(
        [(values[len(p) - 1 :] - torch.from_numpy(sample.logprobs)).abs() for values, p, sample in parts]
    )


def prompt_logprobs(engine: Engine, model: str) -> torch.Tensor:
    """An engine's log-probs of the fixed prompt. model: name of the model or of an adapter."""
    request = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "detokenize": False,
        "return_tokens_as_token_ids": True,
    }
    status, text = engine.call("POST", "/v1/completions", request)
    assert status == 200, text + engine.process.log.read_text()[-6000:]
    entries = json.loads(text)["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([x[str(t)]["logprob"] for t, x in zip(PROMPT[1:], entries, strict=True)])


@dataclass
class Rig:
    """An engine, and two processes that publish shards for it, of weights that follow from a seed."""

    model: Path
    engine: Engine
    trainers: PublishingRanks

    def publish(self, seed: int, version: int, transport: str = "shared_memory") -> Manifest:
        return self.trainers.publish(seed, version, transport)

    def logprobs(self) -> torch.Tensor:
        """The engine's log-probs of the fixed prompt."""
        return prompt_logprobs(self.engine, "policy")

    def error(self, seed: int) -> float:
        """Largest difference of the engine's log-probs to transformers' with the weights of a seed."""
        return (self.logprobs() - hf_logprobs(self.model, state_dict(self.model, seed))).abs().max().item()


@contextmanager
def bridge_engines(
    folder: Path, name: str, tensors: Sequence[int], plugins: Sequence[str] = (), **changes: Any
) -> Iterator[list[Engine]]:
    """Engines with random weights, one for each number of workers; the model is in ``model``.

    changes: sections of the settings.
    """
    make_model(name, folder / "model")
    settings = [
        Settings.model_validate(settings_for(folder / "model", tensor) | changes) for tensor in tensors
    ]
    hold = Path(one_switch.__file__).read_text()
    with running_engines(folder, settings, plugins=[hold, *plugins]) as engines:
        for engine in engines:
            assert engine.versions() == [None] * engine.tensor
        yield engines


@contextmanager
def running_rig(folder: Path, engine: Engine) -> Iterator[Rig]:
    """Trainers for one of ``bridge_engines``."""
    trainers = start_trainers(folder / "model", engine.bridge, folder / "rendezvous")
    try:
        yield Rig(folder / "model", engine, trainers)
    finally:
        trainers.stop()


def check_matrix(
    folder: Path,
    engines: Sequence[Engine],
    name: str,
    worlds: dict[int, dict[str, dict[str, Any]]],
    perturbations: int,
    capsys: pytest.CaptureFixture[str],
    tolerance: float = 1e-3,
    lora: dict[str, Any] | None = None,
    moments: Sequence[Sequence[int]] = ((54,),),
) -> None:
    """Real Megatron ranks in each layout bring their weights into engines of one and of two workers by every
    transport, with each number of ranks; then both compute the same.

    moments: for each generation with syncs under way, the numbers of tokens at which they come: one sync, or
    three, as a control: the second brings the old weights back, for the tokens until the third.
    """
    weights = MODELS[name]().state_dict()
    bias = "mlp.gate.e_score_correction_bias"  # a buffer
    names = {n for n, _ in MODELS[name]().named_parameters()} | {n for n in weights if n.endswith(bias)}
    total = sum(4 * weights[n].numel() for n in names)
    replicated = ("mlp.gate.weight", "shared_expert_gate.weight", bias)
    replicated += ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    norms = sum(4 * weights[n].numel() for n in names if "norm" in n or n.endswith(replicated))
    sizes = [total + (engine.tensor - 1) * norms for engine in engines]
    later = sizes
    if lora is not None:  # each worker reads all adapters, and the model only once
        mapping = AdapterMapping(read_model_shape(folder / "model"), LoraSettings.model_validate(lora))
        of_adapters = sum(4 * math.prod(shape) for shape in mapping.hf_tensors().values())
        later = [engine.tensor * of_adapters for engine in engines]
        sizes = [size + more for size, more in zip(sizes, later, strict=True)]
    syncs = 2 * (perturbations + sum(map(len, moments)))
    for world, layouts in worlds.items():
        case = {
            "token": engines[0].token,
            "bridge": str(engines[0].bridge),
            "engines": [engine.tensor for engine in engines],
            "sockets": [str(engine.process.socket) for engine in engines],
            "settings": settings_for(folder / "model", 1) | ({} if lora is None else {"lora": lora}),
            "layouts": layouts,
            "perturbations": perturbations,
            # The noise adds up, and rounding grows with the weights.
            "noise": 0.05 if perturbations == 1 else 0.02,
            "version": 100_000 * world,
            "long_response": 400 if perturbations == 1 else 500,
            "moments": moments,
        }
        (folder / "case.json").write_text(json.dumps(case))
        results = run_ranks(
            "tests.integration.sync_worker", world, folder, timeout=500 * perturbations + 60 * len(moments)
        )
        for layout, result in results.items():
            assert len(result["mismatch"]) == 2 * perturbations
            assert max(result["mismatch"]) < tolerance, layout
            # Each worker gets its weights once: norms and gates are on every worker, all others on one.
            assert result["bytes"] == [sizes] + [later] * (syncs - 1), layout
            read = dict(zip(("shared_memory", "process_group"), result["checked"], strict=False))
            assert read["process_group"] == [0] * len(sizes), layout
            assert result["checked"][0] == sizes, layout
            assert lora or result["ranks_read"] == list(range(world)), "all replicas send"
            whole = []
            for syncs_at, responses in zip([*moments, *moments], result["switched"], strict=True):
                back, again = syncs_at[1:] or (0, 0)
                for response in responses:
                    odd = response["odd"]
                    assert [token for token, *_ in odd] == list(range(back, again)), f"{layout}: {odd}"
                    assert all(abs(value - old) < one_switch.BOUND for _, value, old, _ in odd), layout
                whole += [] if again else responses
            with capsys.disabled():
                print(
                    f"\n{name}: {layout}: mismatch at most {max(result['mismatch']):.1e}; with a sync under "
                    f"way at most {max(r['gap'] for r in whole):.1e} in {len(whole)} responses, with ties "
                    f"decided otherwise in {sum(r['ties'] for r in whole)}"
                )

"""What several test files need: one thread per process, a small checkpoint, files to train on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

# Before anything imports torch: tests start several processes, whose OpenMP threads would stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background of a script has SIGINT ignored, and would hand that down to commands under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rpg_megatron.config import read_model_shape
from rpg_megatron.models.registry import layout_for

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 256,
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write a Qwen3 with random weights and a byte-level tokenizer; ``changes`` go into its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.08, shape).astype(np.float32)
        for name, shape in layout_for(read_model_shape(folder)).hf_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """``write_checkpoint``, for tests that need a model of another shape."""
    return write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of a tiny random Qwen3. Shared: do not write to it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def config_file(tmp_path: Path, checkpoint: Path) -> Path:
    """A YAML file of a tiny CPU run, with its data beside it; runs go to ``runs`` in the same folder."""
    lines = [json.dumps({"prompt": f"What is {i}+{i}?", "answer": str(2 * i)}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "name": "tiny",
        "runs": str(tmp_path / "runs"),
        "device": "cpu",
        "model": {"path": str(checkpoint)},
        "precision": {"dtype": "float32"},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 128},
        "training": {"steps": 2, "minibatches": 2},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 16},
        "engine": {"max_sequences": 16, "kv_cache_gib": 0.25},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file

"""The example and recipe files, and the overrides that reduce each to the quickstart's model."""

from __future__ import annotations

from pathlib import Path

from rpg_megatron.config import ModelShape, Settings, load_settings
from rpg_megatron.config.model_shape import Rope
from rpg_megatron.config.policy import ParallelSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER = EXAMPLES / "paper"
ABLATIONS = sorted(PAPER.glob("ablation_*/*.yaml"))
ROWS = sorted([*PAPER.glob("table*/*.yaml"), *ABLATIONS, *PAPER.glob("qwen2.5-math-7b/*.yaml")])
H100 = sorted(EXAMPLES.glob("*_dapo_math_*.yaml"))
AHEAD = sorted(EXAMPLES.glob("async/*.yaml"))
MIXTURES = sorted(EXAMPLES.glob("moe/*.yaml"))
HYBRIDS = sorted(EXAMPLES.glob("hybrid/*.yaml"))
ADAPTERS = sorted(EXAMPLES.glob("*_lora.yaml"))
REHEARSED = [*sorted(PAPER.glob("table8*/*.yaml")), *ABLATIONS, EXAMPLES / "qwen3_4b_dapo_math_2k.yaml"]
"""All others are the same runs as one of these when their sizes are overridden."""

_APART = ["engine.colocated=false", "bridge.transport=process_group"]
SEPARATE_8B = ["parallel.data=4", "engine.replicas=8", *_APART]
"""Trainer and engines of ``qwen3_8b_dapo_math_*`` on separate GPUs of two nodes, eight each."""
SEPARATE_30B = [
    *("parallel.data=8", "engine.replicas=4", *_APART),
    *("memory.offload_optimizer=0.5", "cluster={trainer_nodes: 1, engine_nodes: 1}"),
]
"""Those of ``moe/qwen3_30b_a3b_dapo_math_8k``."""

SMALL = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=100,
    tied_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    rope=Rope(1e6),
    norm_eps=1e-6,
    max_positions=100,
    dtype="bfloat16",
)
HALF = SMALL, ParallelSettings(tensor=2, sequence=True), "bfloat16"
"""A rank of two with sequence parallelism: it holds half of the stream, of the heads and of the MLP."""

SIZES = [
    f"model.path={EXAMPLES}/quickstart/model",
    f"data.path={EXAMPLES}/quickstart/train.jsonl",
    "data.preset=null",
    "data.chat=false",
    "data.thinking=null",
    'data.template="{prompt}"',
    "data.max_prompt_tokens=32",
    f"evaluation={{data: {{path: {EXAMPLES}/quickstart/heldout.jsonl, max_prompt_tokens: 32, limit: 8}}}}",
    "device=cpu",
    "precision.dtype=float32",
    "parallel={}",
    "cluster={}",
    "bridge={}",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=48",
    "training.steps=2",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    "engine={max_sequences: 32, kv_cache_gib: 0.25}",
    "checkpoint.every=null",
]


def shrink(file: Path) -> list[str]:
    """The overrides with which a file trains the quickstart's model on one rank.

    Loss, advantage, anchor, optimizer, sampling and reward stay its own.
    """
    overlong = load_settings(file).reward.overlong is not None
    return [*SIZES, "reward.overlong.buffer=8"] if overlong else SIZES


def shrunk(file: Path) -> Settings:
    """A file's settings with its sizes overridden."""
    return load_settings(file, shrink(file))

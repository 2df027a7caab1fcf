"""NeMo-RL's published H100 steps as settings of ours, what ``plan`` says of them, and the one fit.

Rows: NVIDIA-NeMo/RL, docs/about/performance-summary.md of 0.5 and, 8 off, of 0.6 (GRPO, 32 responses a
prompt). Recipes: examples/configs/recipes/llm/performance and grpo_math_1B.yaml of the same repository.
``docs/evidence/plan.md`` lists what the page does not say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import yaml

from rpg_megatron.commands.plan import step_time
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import Plan, find_target, plan_for
from rpg_megatron.commands.plan.step_time import StepTime, estimate_step
from rpg_megatron.config import ModelShape, read_model_shape
from rpg_megatron.config.settings import make_settings
from tests.support.recipes import EXAMPLES

PROMPT = 128
"""Tokens of a prompt with its template; assumed."""
SHARE = 0.6, 0.8
"""Of a GPU's memory that colocated engines and others may use (gpu_memory_utilization)."""


@dataclass(frozen=True)
class Published:
    """A row: sizes that the page states, and its seconds."""

    name: str
    model: str
    gpus: int
    length: int
    """Mean tokens of prompt and response."""
    limit: int
    responses: int
    layout: str
    """Of the trainer, as ``parallel``."""
    engines: int
    tensor: int
    """GPUs of an engine."""
    seconds: float
    off: int = 0
    """Steps off: engines on GPUs of their own sample so far ahead."""
    recompute: str = "none"
    fp8: bool = False


_8OFF = "{data: 128, expert: 8}"
_8B, _32B = "{data: 8}", "{tensor: 4, sequence: true, pipeline: 4, data: 2}"
_30B = "{data: 32, expert: 8}", "{pipeline: 2, data: 8, expert: 8}"
_235B = "{tensor: 2, sequence: true, context: 2, pipeline: 8, data: 4, expert: 16}"
ROWS = (
    Published(
        "Llama-3.1-8B", "llama", 16, 1019, 4096, 2048, "{pipeline: 2, data: 8}", 16, 1, 92.8, 0, "full"
    ),
    Published("Llama-3.1-8B, 1 off", "llama", 16, 1123, 4096, 2048, _8B, 8, 1, 64.8, 1, "full"),
    Published("the same in FP8", "llama", 16, 1128, 4096, 2048, _8B, 8, 1, 53.0, 1, "full", True),
    Published("Qwen3-32B", "Qwen3-32B", 32, 3251, 4096, 2048, _32B, 8, 4, 376),
    Published("Qwen3-32B, 1 off", "Qwen3-32B", 64, 3252, 4096, 2048, _32B, 8, 4, 200, 1),
    Published("Qwen3-30B-A3B", "Qwen3-30B-A3B", 32, 3196, 4096, 2048, _30B[0], 16, 2, 198),
    Published("Qwen3-30B-A3B, 1 off", "Qwen3-30B-A3B", 32, 3201, 4096, 2048, _30B[1], 8, 2, 154, 1),
    Published("Qwen3-30B-A3B, 8 off", "Qwen3-30B-A3B", 192, 3203, 4096, 2048, _8OFF, 32, 2, 34.0, 8),
    Published("Qwen3-235B-A22B", "Qwen3-235B-A22B", 128, 5700, 8192, 512, _235B, 8, 16, 431, 0, "full"),
)


def shape_of(model: str) -> ModelShape:
    """Sizes of a model; Llama-3.1-8B's are those of its config.json."""
    if model != "llama":
        return read_model_shape(EXAMPLES / "models" / model)
    sizes = {"num_layers": 32, "ffn_hidden_size": 14336, "vocab_size": 128256, "qk_norm": False}
    return replace(shape_of("Qwen3-8B-Base"), family="llama", max_positions=131072, **sizes)  # type: ignore[arg-type]


@cache
def planned(row: Published) -> Plan:
    """The plan of a row."""
    shape, target = (
        shape_of(row.model),
        find_target(make_settings(_values(row, 1), None, row.name), "h100-80"),
    )
    first = plan_for(make_settings(_values(row, 1), None, row.name), shape, target)
    # What is left for keys and values, beside weights and 2 GiB of everything else.
    left = int(SHARE[0] * target.nbytes - first.engine.weights) // 1024**3 - 2
    return first if row.off else plan_for(make_settings(_values(row, left), None, row.name), shape, target)


def _values(row: Published, kv_cache_gib: int) -> dict[str, object]:
    engine: dict[str, object] = {"replicas": row.engines, "tensor": row.tensor, "max_sequences": 1024}
    shared = {**engine, "colocated": True, "kv_cache_gib": kv_cache_gib}
    apart = {**engine, "arguments": [f"--gpu-memory-utilization={SHARE[1]}"]}
    if row.fp8:
        apart["quantization"] = "fp8"
    return {
        "name": "published",
        "device": "cuda",
        "model": {"path": str(EXAMPLES / "models" / "Qwen3-8B-Base")},
        "data": {"path": str(EXAMPLES / "quickstart" / "train.jsonl"), "max_prompt_tokens": PROMPT},
        "rollout": {
            "prompts_per_step": row.responses // 32,
            "samples_per_prompt": 32,
            "max_response_tokens": row.limit - PROMPT,
            "ahead": row.off,
        },
        "training": {
            "old": "pass",  # as theirs
            "steps": 10,
            "minibatches": row.responses // 512,
            "tokens_per_microbatch": row.limit,
        },
        "memory": {"recompute": row.recompute},
        "parallel": yaml.safe_load(row.layout),
        "anchor": {"type": "fixed"},  # a pass of the reference model, for a KL term
        "correction": {"type": "truncate", "high": 2.0} if row.off else None,
        "engine": apart if row.off else shared,
        "bridge": {"transport": "process_group" if row.off else "cuda_ipc"},
        "precision": {"dtype": "bfloat16", "fp8": {"recipe": "blockwise"} if row.fp8 else None},
    }


def predict(row: Published, *options: str) -> StepTime:
    """The step of a row with the default assumptions, its lengths, and those of ``options``."""
    response = (row.length - PROMPT) / (row.limit - PROMPT)
    assumed = assume("h100-80", [f"response_mean={response}", "prompt_mean=1", *options])
    with patch.object(step_time, "SLICE", 0.0):  # of our sync's checksums, which other systems do not have
        return estimate_step(planned(row), assumed)


def fit(rows: Sequence[Published]) -> float:
    """The ``decode_efficiency`` with the smallest sum of squared logarithms of predicted / published."""

    def error(percent: int) -> float:
        options = f"decode_efficiency={percent / 100}"
        return sum(math.log(predict(row, options).step / row.seconds) ** 2 for row in rows)

    return min(range(20, 81), key=error) / 100

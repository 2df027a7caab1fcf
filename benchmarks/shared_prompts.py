"""What ``training.share_prompts`` saves: tokens computed, time and memory, by the length of the prompt."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.policies import build, sized, start, trajectory_of, write_checkpoint
from benchmarks.setup import Table, benchmark, main, seconds
from rpg_megatron.config import read_model_shape
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.allocations import AllocationWatch

VOCABULARY, CHUNK = 8192, 1024


@benchmark(sequence=33, samples=2, repeat=1)
def shared_prompts(sequence: int = 1100, samples: int = 8, repeat: int = 5) -> None:
    """Ratios of rows with shared prompts to plain rows, on one process and one thread, in float32.

    A group of ``samples`` responses of equal length in one row; prompt and response have ``sequence`` tokens
    together. A model of 2 layers and hidden size 256. Both kinds of rows in turns, medians of processor time;
    bytes are those of tensors, beyond weights and gradients (docs/evidence/long-context.md).
    """
    device, mesh = start("cpu")
    columns = (
        "prompt",
        "response",
        "tokens: plain",
        "shared",
        "ratio|.2f",
        "time: scoring|.2f",
        "update|.2f",
    )
    table = Table(*columns, "memory: scoring|.2f", "update|.2f")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        model, budget = make_checkpoint(Path(place) / "model", VOCABULARY), samples * sequence
        plain, shared = (
            build_policy(model, mesh, device, budget, memory={"recompute": "none"}, share_prompts=share)
            for share in (False, True)
        )
        for parts in (30, 11, 2, 1.1):
            length = round(sequence / parts)
            prompt = rng.integers(1, VOCABULARY, length)
            draw = [rng.integers(1, VOCABULARY, sequence - length) for _ in range(samples)]
            group = [
                trajectory_of(np.concatenate([prompt, r]).astype(np.int32), length, i, VOCABULARY)
                for i, r in enumerate(draw)
            ]
            packs = [(policy, [policy.pack(group)]) for policy in (plain, shared)]
            results = [
                measure([partial(work, policy, rows) for policy, rows in packs], repeat)
                for work in (Policy.logprobs, run_policy)
            ]
            tokens = [rows[0].tokens_computed for _, rows in packs]
            ratios = [r[1][column] / r[0][column] for column in (0, 1) for r in results]
            table.row(length, sequence - length, *tokens, tokens[1] / tokens[0], *ratios)
    dist.destroy_process_group()


def make_checkpoint(folder: Path, vocab: int) -> Path:
    """A random Qwen3 of 2 layers and hidden size 256, in float32."""
    shape = sized(2, 256, 768, 4, 2, 64, vocab, tied_embeddings=False, dtype="float32")
    return write_checkpoint(folder, shape)


def build_policy(
    model: Path,
    mesh: Mesh,
    device: torch.device,
    budget: int,
    *,
    share_prompts: bool = False,
    **sections: Any,
) -> Policy:
    """A policy on this process whose optimizer step is a no-op."""
    training = {"tokens_per_microbatch": budget, "logprob_chunk": CHUNK, "share_prompts": share_prompts}
    policy = build(read_model_shape(model), mesh, device, "fp32", model, training=training, **sections)
    policy._optimizer.step = lambda: (True, 0.0, None)  # type: ignore[method-assign]
    return policy


def run_policy(policy: Policy, packs: list[MicroBatch]) -> None:
    """Forward and backward of a mini-batch."""
    with policy.updating():
        policy.update(packs, build_loss(policy.settings), build_aggregator(policy.settings), lr=0.0)


def measure(methods: list[Callable[[], object]], repeat: int) -> list[tuple[float, int]]:
    """Median CPU seconds of each method, measured in turns, and peak bytes, from a separate pass."""
    peaks, times = [], []
    for method in methods:
        method()
        with AllocationWatch() as watch:
            method()
        peaks.append(watch.peak)
    for _ in range(repeat):
        times.append([seconds(method, clock=time.process_time) for method in methods])
    return list(zip(map(median, zip(*times, strict=True)), peaks, strict=True))


if __name__ == "__main__":
    main(__doc__, shared_prompts)

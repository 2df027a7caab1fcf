"""What ``training.share_prompts`` saves: tokens computed, time and memory, by the length of the prompt."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmarks.long_context import build_policy, make_checkpoint, measure, run_policy
from benchmarks.policies import start, trajectory_of
from benchmarks.setup import Report, benchmark, main, write_block

VOCABULARY = 8192


@benchmark(sequence=33, samples=2, repeat=1)
def shared_prompts(
    report: Report, sequence: int = 1100, samples: int = 8, repeat: int = 5, write: bool = False
) -> None:
    """Ratios of rows with shared prompts to plain rows, on one process and one thread, in float32.

    A group of ``samples`` responses of equal length in one row; prompt and response have ``sequence`` tokens
    together. A model of 2 layers and hidden size 256. Both kinds of rows in turns, medians of processor time;
    bytes are those of tensors, beyond weights and gradients. write: the table of
    docs/evidence/long-context.md.
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
    table = report.table(*columns, "memory: scoring|.2f", "update|.2f")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        checkpoint = make_checkpoint(Path(place) / "model", VOCABULARY)
        policies = {
            name: build_policy(
                checkpoint,
                mesh,
                device,
                samples * sequence,
                memory={"recompute": "none"},
                training={"share_prompts": name == "shared"},
            )
            for name in ("plain", "shared")
        }
        for parts in (30, 11, 2, 1.1):
            length = round(sequence / parts)
            prompt = rng.integers(1, VOCABULARY, length)
            draw = [rng.integers(1, VOCABULARY, sequence - length) for _ in range(samples)]
            group = [
                trajectory_of(np.concatenate([prompt, r]).astype(np.int32), length, i, VOCABULARY)
                for i, r in enumerate(draw)
            ]
            packs = {name: [policy.pack(group)] for name, policy in policies.items()}
            scoring = {n: partial(policies[n].logprobs, packs[n]) for n in policies}
            update = {n: partial(run_policy, policies[n], packs[n]) for n in policies}
            results = [measure(methods, repeat) for methods in (scoring, update)]
            plain, shared = (packs[n][0].tokens_computed for n in policies)
            ratios = [r["shared"][column] / r["plain"][column] for column in (0, 1) for r in results]
            table.row(length, sequence - length, plain, shared, shared / plain, *ratios)
    dist.destroy_process_group()
    if write:
        write_block("evidence/long-context.md", "shared_prompts", str(table))


if __name__ == "__main__":
    main(__doc__, shared_prompts)

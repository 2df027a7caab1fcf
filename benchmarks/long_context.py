"""What packing and the chunked log-prob head save: speed and memory of an update at 1K to 8K tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.policies import QWEN3, build, start, trajectory_of, write_checkpoint
from benchmarks.setup import Report, Table, benchmark, main, seconds, write_block
from rpg_megatron.config import read_model_shape
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.allocations import AllocationWatch

MIB = 1024**2
ROW = 4
"""Sequences in a padded micro-batch."""
TOKENS, VOCABULARY, CHUNK = 8192, 151_936, 1024
"""Of the second table."""


@benchmark(lengths=(64,), repeat=1, tokens=128, vocabulary=512)
def long_context(
    report: Report,
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192),
    repeat: int = 3,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    write: bool = False,
) -> None:
    """Two tables of a model of 2 layers and hidden size 256 on one process and one thread, in float32.

    1. Forward and backward passes over the same ragged batches, three ways: our packed rows, as long as the
       longest sequence; the same model on rows of four sequences, each padded to the longest of its row;
       transformers with the same weights, the same padded rows and full logits. Tokens that count are real
       ones. Optimizers are left out: they are the same.
    2. Peak memory of the log-prob pass and of an update with a real vocabulary. Plain torch is measured at an
       eighth and a quarter of the tokens and extended by a line: at 8,192 it would not fit.

    Bytes are those of tensors, beyond weights and gradients. Time is processor time, so a machine that does
    other work gives the same ratios. Such a model says nothing about the speed of a large one on a GPU.
    write: put both tables into docs/evidence/long-context.md.
    """
    device, mesh = start("cpu")
    with tempfile.TemporaryDirectory() as place:
        tables = [
            compare_speed(report, Path(place), mesh, device, lengths, repeat),
            compare_memory(report, Path(place), mesh, device, tokens, vocabulary),
        ]
    dist.destroy_process_group()
    if write:
        write_block("evidence/long-context.md", "long_context", "\n\n".join(map(str, tables)))


def make_checkpoint(folder: Path, vocab: int) -> Path:
    """A random Qwen3 of 2 layers and hidden size 256, in float32."""
    shape = replace(
        QWEN3,
        num_layers=2,
        hidden_size=256,
        ffn_hidden_size=768,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=vocab,
        tied_embeddings=False,
        dtype="float32",
    )
    return write_checkpoint(folder, shape)


def build_policy(model: Path, mesh: Mesh, device: torch.device, budget: int, **sections: Any) -> Policy:
    """A policy on this process whose optimizer step is a no-op."""
    training = {"tokens_per_microbatch": budget, "logprob_chunk": CHUNK, **sections.pop("training", {})}
    policy = build(read_model_shape(model), mesh, device, "fp32", model, training=training, **sections)
    policy._optimizer.step = lambda: (True, 0.0, None)  # type: ignore[method-assign]
    return policy


def run_policy(policy: Policy, packs: list[MicroBatch]) -> None:
    """Forward and backward of a mini-batch."""
    with policy.updating():
        policy.update(packs, build_loss(policy.settings), build_aggregator(policy.settings), lr=0.0)


# -- speed ---------------------------------------------------------------------------------------------------


def compare_speed(
    report: Report, folder: Path, mesh: Mesh, device: torch.device, lengths: Sequence[int], repeat: int
) -> Table:
    """The first table."""
    vocab = 8192
    checkpoint = make_checkpoint(folder / "speed", vocab)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    for p in model.parameters():  # gradients are allocated in advance, as in the policy
        p.grad = torch.zeros_like(p)
    columns = ("longest", "sequences", "real tokens", "padded|.0%", "speed: padded|.2f", "packed|.2f")
    columns += ("transformers|.2f", "peak MiB: padded|.0f", "packed|.0f", "transformers|.0f")
    table = report.table(*columns)
    for longest in lengths:
        sequences = ragged_tokens(longest, vocab, total=3 * longest)
        sizes = [len(s) for s in sequences]
        policy = build_policy(checkpoint, mesh, device, longest, memory={"recompute": "none"})
        attention = read_model_shape(checkpoint).attention_length
        ((plan,),) = plan_batches(sizes, minibatches=1, data=1, budget=longest, attention_length=attention)
        packs = [policy.pack([trajectory_of(sequences[i], 8, i) for i in micro]) for micro in plan]
        rows = [list(range(i, min(i + ROW, len(sizes)))) for i in range(0, len(sizes), ROW)]
        padded = [policy.pack(pad_row([sequences[i] for i in row])) for row in rows]
        methods: dict[str, Callable[[], None]] = {
            "padded": lambda policy=policy, packs=padded: run_policy(policy, packs),
            "packed": lambda policy=policy, packs=packs: run_policy(policy, packs),
            "transformers": lambda s=sequences, r=rows: run_transformers(model, s, r),
        }
        results = measure(methods, repeat)
        padding = 1 - sum(sizes) / sum(pack.size for pack in padded)
        speeds = [results["padded"][0] / results[method][0] for method in methods]
        peaks = [results[method][1] / MIB for method in methods]
        table.row(longest, len(sizes), sum(sizes), padding, *speeds, *peaks)
    return table


def pad_row(sequences: list[np.ndarray]) -> list[Trajectory]:
    """Pad each response with zeros to the longest one; here the zeros count as response tokens."""
    longest = max(map(len, sequences))
    return [trajectory_of(np.pad(s, (0, longest - len(s))), 8, number) for number, s in enumerate(sequences)]


def measure(methods: dict[str, Callable[[], None]], repeat: int) -> dict[str, tuple[float, int]]:
    """Median CPU seconds of each method, measured in turns, and peak bytes, from a separate pass."""
    peaks, times = {}, {name: [] for name in methods}
    for name, method in methods.items():
        method()
        with AllocationWatch() as watch:
            method()
        peaks[name] = watch.peak
    for _ in range(repeat):
        for name, method in methods.items():
            times[name].append(seconds(method, clock=time.process_time))
    return {name: (float(np.median(times[name])), peaks[name]) for name in methods}


def ragged_tokens(longest: int, vocab: int, total: int) -> list[np.ndarray]:
    """Sequences of ``total`` tokens or a few more, log-normal in length around a quarter of the longest."""
    rng = np.random.default_rng(longest)
    lengths = [longest]
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.lognormal(np.log(longest / 4), 0.7), 16, longest)))
    return [rng.integers(1, vocab, n).astype(np.int32) for n in lengths]


def run_transformers(model: torch.nn.Module, sequences: list[np.ndarray], rows: list[list[int]]) -> None:
    """Forward and backward by transformers: padded rows, full logits, log_softmax."""
    count = sum(len(s) for s in sequences)
    for row in rows:
        longest = max(len(sequences[i]) for i in row)
        tokens, mask = torch.zeros(len(row), longest, dtype=torch.long), torch.zeros(len(row), longest)
        for place, i in enumerate(row):
            tokens[place, : len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            mask[place, : len(sequences[i])] = 1
        logits = model(tokens, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
        logp = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        weight = mask[:, 1:] * torch.tensor([(-1.0) ** i for i in row])[:, None]
        (-(logp * weight).sum() / count).backward()


# -- memory --------------------------------------------------------------------------------------------------


def compare_memory(
    report: Report, folder: Path, mesh: Mesh, device: torch.device, tokens: int, vocabulary: int
) -> Table:
    """The second table."""
    peaks = head_peaks(make_checkpoint(folder / "memory", vocabulary), mesh, device, tokens, vocabulary)
    chunk, measured = 4 * CHUNK * vocabulary, (tokens // 8, tokens // 4)
    columns = (
        f"{tokens} tokens x {vocabulary}",
        "peak MiB|.0f",
        f"in chunks of {CHUNK} tokens' fp32 logits|.2f",
    )
    columns += (f"plain torch at {measured[0]}, {measured[1]}", "extended")
    table = report.table(*columns)
    for name, backward in (("scoring", False), ("update", True)):
        small, large = (plain_peak(n, backward=backward, vocabulary=vocabulary) for n in measured)
        line = small + (large - small) * (tokens - measured[0]) / (measured[1] - measured[0])
        extended = f"{line / MIB:.0f} ({line / peaks[name]:.0f} x)"
        sizes = (peaks[name] / MIB, peaks[name] / chunk, f"{small / MIB:.0f}, {large / MIB:.0f}")
        table.row(name, *sizes, extended)
    return table


def plain_peak(tokens: int, *, backward: bool, vocabulary: int = VOCABULARY) -> int:
    """Peak bytes of log_softmax and entropy on full logits, beyond weight and hidden states."""
    hidden = torch.randn(tokens, 256, requires_grad=backward)
    weight = torch.randn(vocabulary, 256, requires_grad=backward)
    targets = torch.randint(0, vocabulary, (tokens, 1))
    with AllocationWatch() as watch:
        log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
        rows = log_p.gather(1, targets)[:, 0] - (log_p.exp() * log_p).sum(-1)
        if backward:
            rows.sum().backward()
    return watch.peak - (4 * weight.numel() if backward else 0)


def head_peaks(
    checkpoint: Path, mesh: Mesh, device: torch.device, tokens: int, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """Peak bytes of our log-prob pass and update on ``tokens`` tokens, and the elements of their largest
    tensor.

    The update's peak is without the gradient of the output weight.
    """
    policy = build_policy(checkpoint, mesh, device, tokens)
    rng = np.random.default_rng(0)
    cuts = [0, 1, 9, tokens // 16, tokens // 3, tokens]
    sequences = [rng.integers(1, vocabulary, b - a + 1).astype(np.int32) for a, b in pairwise(sorted(cuts))]
    packs = [policy.pack([trajectory_of(s, 1, i) for i, s in enumerate(sequences)])]
    assert packs[0].size == tokens
    with AllocationWatch() as scoring:
        policy.logprobs(packs)
    with AllocationWatch() as update:
        run_policy(policy, packs)
    return {
        "scoring": scoring.peak,
        "update": update.peak - 4 * 256 * vocabulary,
        "largest": max(torch.Size(w.largest).numel() for w in (scoring, update)),
    }


if __name__ == "__main__":
    main(__doc__, long_context)

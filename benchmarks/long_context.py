"""What packing and the chunked log-prob head save: speed and memory of an update at 1K to 8K tokens.

``python -m benchmarks.long_context`` prints two tables; ``--write`` puts them into docs/long-context.md.

1. Forward and backward passes over the same ragged batches, three ways, on one process and one thread: our
   packed rows, as long as the longest sequence; the same model on rows of four sequences, each padded to the
   longest of its row; transformers with the same weights, the same padded rows and full logits. Tokens that
   count are real ones. Optimizers are left out: they are the same.
2. Peak memory of the log-prob pass and of an update with a vocabulary of 151,936. Plain torch is measured at
   1,024 and 2,048 tokens and extended by a line: at 8,192 it would not fit the machine that this is run on.

Bytes are those of tensors, beyond weights and gradients (see ``allocations.py``). Time is processor
time, so a machine that does other work gives the same ratios. A model of 2 layers and
hidden size 256 says nothing about the speed of a large one on a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.allocations import AllocationWatch
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss

PAGE = Path(__file__).parents[1] / "docs" / "long-context.md"
BEGIN, END = "<!-- tables: benchmarks/long_context.py -->", "<!-- end of tables -->"
MIB = 1024**2
ROW = 4
"""Sequences in a padded micro-batch."""
LENGTHS = (1024, 2048, 4096, 8192)
REPEATS = 3
TOKENS, VOCABULARY, CHUNK = 8192, 151_936, 1024
"""Of the second table."""


def make_checkpoint(folder: Path, vocab: int) -> Path:
    """A random Qwen3 of 2 layers and hidden size 256, in float32."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def build_policy(model: Path, mesh: Mesh, device: torch.device, budget: int, **sections: Any) -> Policy:
    """The policy on this process, whose optimizer does nothing."""
    settings = Settings.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused"},
            "device": "cpu",
            "precision": {"dtype": "float32"},
            "objective": {"clip": None},
            "training": {"tokens_per_microbatch": budget, "logprob_chunk": CHUNK},
            **sections,
        }
    )
    shape = read_model_shape(model)
    layout = mapping_for(shape)

    def load(policy: Policy) -> None:
        load_hf_weights(model, policy.named_parameters(), layout, tensor=1, tensor_rank=0, vocab_multiple=1)

    policy = Policy(settings, shape, mesh, device, load)
    policy._optimizer.step = lambda: (True, 0.0, None)  # type: ignore[method-assign]
    return policy


def trajectory(number: int, tokens: np.ndarray, prompt: int, padding: int = 0) -> Trajectory:
    """``padding``: zeros behind the response, which nothing could tell from it here."""
    response = np.concatenate([tokens[prompt:], np.zeros(padding, np.int32)]).astype(np.int32)
    behaviour = np.full(len(response), -np.log(1e4), np.float32)
    return Trajectory(
        prompt_id=number,
        sample=0,
        prompt=tokens[:prompt],
        response=response,
        behaviour=behaviour,
        old=behaviour,
        anchor=behaviour,
        versions=np.zeros(len(response), np.int32),
        finish="stop",
        text="",
        advantage=(-1.0) ** number,
    )


def ragged_tokens(longest: int, vocab: int, total: int) -> list[np.ndarray]:
    """Sequences of ``total`` tokens or a few more, log-normal in length around a quarter of the longest."""
    random = np.random.default_rng(longest)
    lengths = [longest]
    while sum(lengths) < total:
        lengths.append(int(np.clip(random.lognormal(np.log(longest / 4), 0.7), 16, longest)))
    return [random.integers(1, vocab, n).astype(np.int32) for n in lengths]


def run_policy(policy: Policy, packs: list[MicroBatch]) -> None:
    """Forward and backward of a mini-batch."""
    with policy.updating():
        policy.update(packs, build_loss(policy.settings), build_aggregator(policy.settings), lr=0.0)


def run_transformers(model: torch.nn.Module, sequences: list[np.ndarray], rows: list[list[int]]) -> None:
    """The same by transformers: padded rows, full logits, log_softmax."""
    count = sum(len(s) for s in sequences)
    for row in rows:
        longest = max(len(sequences[i]) for i in row)
        tokens, mask = torch.zeros(len(row), longest, dtype=torch.long), torch.zeros(len(row), longest)
        for place, i in enumerate(row):
            tokens[place, : len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            mask[place, : len(sequences[i])] = 1
        logits = model(tokens, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
        log_p = torch.log_softmax(logits, -1)
        logp = log_p.gather(2, tokens[:, 1:, None])[..., 0]
        weight = mask[:, 1:] * torch.tensor([(-1.0) ** i for i in row])[:, None]
        (-(logp * weight).sum() / count).backward()


def measure(ways: dict[str, Callable[[], None]]) -> dict[str, tuple[float, int]]:
    """Median processor seconds of each, taken in turns, and peak bytes, of a pass of its own."""
    peaks = {}
    for name, way in ways.items():
        way()
        with AllocationWatch() as watch:
            way()
        peaks[name] = watch.peak
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {name: (statistics.median(seconds[name]), peaks[name]) for name in ways}


def compare_speed(folder: Path, mesh: Mesh, device: torch.device, lengths: Sequence[int]) -> list[str]:
    """The first table."""
    vocab = 8192
    checkpoint = make_checkpoint(folder / "speed", vocab)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    for p in model.parameters():  # gradients are there before, as in the policy
        p.grad = torch.zeros_like(p)
    table = [
        "| longest | sequences | real tokens | padded | speed: padded | packed | transformers "
        "| peak MiB: padded | packed | transformers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for longest in lengths:
        sequences = ragged_tokens(longest, vocab, total=3 * longest)
        sizes = [len(s) for s in sequences]
        policy = build_policy(checkpoint, mesh, device, longest, memory={"recompute": "none"})
        ((plan,),) = plan_batches(
            sizes,
            minibatches=1,
            data=1,
            budget=longest,
            attention_length=read_model_shape(checkpoint).attention_length,
        )
        packs = [policy.pack([trajectory(i, sequences[i], 8) for i in micro]) for micro in plan]
        rows = [list(range(i, min(i + ROW, len(sizes)))) for i in range(0, len(sizes), ROW)]
        filled = [
            policy.pack([trajectory(i, sequences[i], 8, max(sizes[j] for j in row) - sizes[i]) for i in row])
            for row in rows
        ]
        found = measure(
            {
                "packed": lambda policy=policy, packs=packs: run_policy(policy, packs),
                "padded": lambda policy=policy, packs=filled: run_policy(policy, packs),
                "transformers": lambda s=sequences, r=rows: run_transformers(model, s, r),
            }
        )
        base = found["padded"][0]
        padding = 1 - sum(sizes) / sum(p.size for p in filled)
        speeds = [f"{base / found[w][0]:.2f}" for w in ("padded", "packed", "transformers")]
        peaks = [f"{found[w][1] / MIB:.0f}" for w in ("padded", "packed", "transformers")]
        table.append(
            f"| {longest} | {len(sizes)} | {sum(sizes)} | {padding:.0%} | {' | '.join(speeds + peaks)} |"
        )
        print(table[-1], flush=True)
    return table


def plain_peak(tokens: int, *, backward: bool) -> int:
    """Peak bytes of log_softmax and entropy on full logits, beyond weight and hidden states."""
    hidden = torch.randn(tokens, 256, requires_grad=backward)
    weight = torch.randn(VOCABULARY, 256, requires_grad=backward)
    targets = torch.randint(0, VOCABULARY, (tokens, 1))
    with AllocationWatch() as watch:
        log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
        rows = log_p.gather(1, targets)[:, 0] - (log_p.exp() * log_p).sum(-1)
        if backward:
            rows.sum().backward()
    return watch.peak - (4 * weight.numel() if backward else 0)


def head_peaks(checkpoint: Path, mesh: Mesh, device: torch.device, tokens: int) -> dict[str, Any]:
    """Peak bytes of our log-prob pass and update on ``tokens`` tokens, and the largest tensor of them.

    From the update's, the gradient of the output weight is taken off: it waits there to be added up.
    """
    policy = build_policy(checkpoint, mesh, device, tokens)
    random = np.random.default_rng(0)
    cuts = [0, 1, 9, tokens // 16, tokens // 3, tokens]
    sequences = [random.integers(1, VOCABULARY, b - a + 1).astype(np.int32) for a, b in pairwise(cuts)]
    packs = [policy.pack([trajectory(i, s, 1) for i, s in enumerate(sequences)])]
    assert packs[0].size == tokens
    with AllocationWatch() as scoring:
        policy.logprobs(packs)
    with AllocationWatch() as update:
        run_policy(policy, packs)
    return {
        "scoring": scoring.peak,
        "update": update.peak - 4 * 256 * VOCABULARY,
        "largest": max(torch.Size(w.largest).numel() for w in (scoring, update)),
    }


def compare_memory(folder: Path, mesh: Mesh, device: torch.device) -> list[str]:
    """The second table."""
    checkpoint = make_checkpoint(folder / "memory", VOCABULARY)
    ours = head_peaks(checkpoint, mesh, device, TOKENS)
    chunk = 4 * CHUNK * VOCABULARY
    table = [
        f"| {TOKENS} tokens x {VOCABULARY} | peak MiB | in chunks of {CHUNK} tokens' fp32 logits "
        "| plain torch at 1024, 2048 | extended |",
        "|---|---|---|---|---|",
    ]
    for name, backward in (("scoring", False), ("update", True)):
        small, large = (plain_peak(n, backward=backward) for n in (1024, 2048))
        line = small + (large - small) * (TOKENS - 1024) // 1024
        table.append(
            f"| {name} | {ours[name] / MIB:.0f} | {ours[name] / chunk:.2f} "
            f"| {small / MIB:.0f}, {large / MIB:.0f} | {line / MIB:.0f} ({line / ours[name]:.0f} x) |"
        )
        print(table[-1], flush=True)
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--write", action="store_true", help="put the tables into docs/long-context.md")
    options.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="of the first table")
    chosen = options.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    device = start_device("cpu")
    start_process_group(device)
    mesh = start_mesh(Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}).parallel)
    with tempfile.TemporaryDirectory() as place:
        tables = compare_speed(Path(place), mesh, device, chosen.lengths)
        tables += ["", *compare_memory(Path(place), mesh, device)]
    dist.destroy_process_group()
    print("\n".join(tables))
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(tables) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

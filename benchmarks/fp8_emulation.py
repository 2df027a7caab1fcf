"""What each FP8 recipe does to log-probs and gradients, by emulation on a CPU: against bfloat16.

``python -m benchmarks.fp8_emulation`` scores and differentiates one micro-batch with the quickstart's model,
on 256 problems and solutions of its own kind, and with one of 29 million parameters, random weights on random
tokens. It prints, against the policy in bfloat16: of log-probs the mean difference in nats, its largest, and
the norm of the difference over the norm; of the gradient of all parameters together the latter. Delayed
scaling comes twice: with the scales of 1 that a run begins with, and with those after one update.
float32 says how far bfloat16 itself is from better numbers.

    python -m benchmarks.fp8_emulation --runs DIR

prints the results of the runs in DIR that are named PRECISION_SEED instead.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.gpu_numbers import numbers, policy_of
from benchmarks.gpu_policies import QUICKSTART, SHAPES, batch_of, machine, start, write_checkpoint
from rpg_megatron.config import ModelShape, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import Mesh

RECIPES = ("blockwise", "tensorwise", "delayed")
SHAPE = replace(
    SHAPES["tiny"],
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=4096,
    tied_embeddings=False,
)


def problems(count: int, seed: int = 0) -> list[Trajectory]:
    """The quickstart's problems, each with a solution as the model has learnt to write it, right or wrong."""
    made = runpy.run_path(str(QUICKSTART / "make_quickstart.py"))
    tokenizer = Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))
    rng, texts = random.Random(seed), []
    for _ in range(count):
        problem = made["draw_problem"](rng)
        texts.append((made["prompt_of"](problem), made["solution"](problem, rng)))
    rows = [[tokenizer.encode(text, add_special_tokens=False).ids for text in pair] for pair in texts]
    found = batch_of([len(prompt) + len(response) for prompt, response in rows], 2)
    for trajectory, (prompt, response) in zip(found, rows, strict=True):
        trajectory.prompt, trajectory.response = np.array(prompt, np.int32), np.array(response, np.int32)
        trajectory.behaviour = trajectory.old = trajectory.anchor = np.zeros(len(response), np.float32)
        trajectory.versions, trajectory.mask = np.zeros(len(response), np.int32), np.ones(len(response), bool)
    return found


def measure(
    folder: Path, shape: ModelShape, batch: list[Trajectory], mesh: Mesh, device: torch.device
) -> Iterator[str]:
    """Rows of the table for a model."""
    plain, plain_gradient = numbers(policy_of(folder, shape, mesh, device, "bf16"), batch)

    def row(name: str, logp: torch.Tensor, gradient: torch.Tensor) -> str:
        apart = logp - plain
        relative = apart.norm() / plain.norm()
        of_gradient = (gradient - plain_gradient).norm() / plain_gradient.norm()
        nats = f"{apart.abs().mean():.4f} | {apart.abs().max():.3f}"
        return f"| {name} | {nats} | {relative:.1%} | {of_gradient:.1%} |"

    yield row("float32", *numbers(policy_of(folder, shape, mesh, device, "fp32"), batch))
    for recipe in RECIPES:
        policy = policy_of(folder, shape, mesh, device, recipe)
        found = row(recipe, *numbers(policy, batch))
        if recipe == "delayed":
            yield found.replace(recipe, "delayed, with scales of 1")
            found = row(recipe, *numbers(policy, batch))
        yield found


def of_runs(folder: Path) -> Iterator[str]:
    """A row for each precision: held-out accuracies and mismatch, from the runs' own files."""
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for run in sorted(folder.glob("*_*-*")):
        name, seed = run.name.rpartition("-")[0].rsplit("_", 1)
        if not (run / "summary.json").is_file():
            continue
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "mismatch/logp_mean" in row]
        found[name][int(seed)] = {
            "after": 100 * summary["accuracy_after"]["heldout"],
            "first": steps[0]["mismatch/logp_mean"],
            "later": fmean(row["mismatch/logp_mean"] for row in steps[1:]),
            "p99": fmean(row["mismatch/logp_p99"] for row in steps),
            "largest": max(row["mismatch/logp_max"] for row in steps),
            "norm": fmean(row["policy/grad_norm"] for row in steps),
            "skipped": sum(row["policy/skipped_updates"] for row in steps),
        }
    yield "| | held out, % | mean | mismatch in step 1 | later | p99 | largest | gradient norm | skipped |"
    yield "|---" * 9 + "|"
    for name in ("bf16", *RECIPES):
        if not (runs := list(found.get(name, {}).values())):
            continue
        mean = {key: fmean(run[key] for run in runs) for key in runs[0]}
        yield (
            f"| {name} | {', '.join(f'{run["after"]:.1f}' for run in runs)} | {mean['after']:.1f} | "
            f"{mean['first']:.4f} | {mean['later']:.4f} | {mean['p99']:.3f} | "
            f"{max(run['largest'] for run in runs):.2f} | {mean['norm']:.2f} | "
            f"{sum(run['skipped'] for run in runs):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.runs:
        print(*of_runs(args.runs), sep="\n")
        return
    device, mesh = start("cpu")
    print(machine(device))
    quickstart = QUICKSTART / "model"
    with tempfile.TemporaryDirectory() as work:
        for name, folder, shape, batch in (
            ("quickstart", quickstart, read_model_shape(quickstart), problems(256)),
            (
                "29M, random weights",
                write_checkpoint(Path(work) / "model", SHAPE),
                SHAPE,
                batch_of([100, 400, 500], SHAPE.vocab_size),
            ),
        ):
            print(f"\n| {name} | log-probs: mean, nats | largest | relative | gradient, relative |")
            print("|---" * 5 + "|")
            for row in measure(folder, shape, batch, mesh, device):
                print(row, flush=True)


if __name__ == "__main__":
    main()

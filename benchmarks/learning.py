"""How losses learn: a shortened quickstart with every loss and several seeds, each run kept as evidence.

Runs are appended to docs/evidence/objectives.jsonl as they end; those that are there are not repeated, so
the same command goes on where it stopped. The table has means over seeds and (lowest to highest). A tiny
model on arithmetic shows that something trains, and how far losses spread, not which is better at scale.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.setup import ROOT, Table, benchmark, main, train

FILE = ROOT / "docs" / "evidence" / "objectives.jsonl"
SOURCES = ("rpg_megatron", "examples/quickstart", "examples/quickstart.yaml")
"""Files that affect a run."""
SETTINGS = (
    "checkpoint.every=null",
    "export.enabled=false",
    "training.steps=6",
    "rollout.prompts_per_step=48",
)
SETTINGS += ("evaluation.every=6", "evaluation.samples=4")
LOSSES = {
    f"RPG-{'REINFORCE-' * (estimator == 'reinforce')}{divergence.upper()}": [
        f"objective={{type: rpg, divergence: {divergence}, estimator: {estimator}}}"
    ]
    for estimator, divergence in itertools.product(
        ("reinforce", "differentiable"), ("fkl", "ufkl", "rkl", "urkl")
    )
} | {
    "GRPO": ["objective={type: grpo}", "advantage.type=grpo", "anchor.type=fixed"],
    "DAPO": ["objective={type: dapo}", "advantage.type=grpo"],
    "REINFORCE++": ["objective={type: reinforce_plus_plus}", "advantage.type=reinforce_plus_plus"],
}
COLUMNS = {
    "accuracy before|.1%": "before",
    "after|.1%": "after",
    "entropy, nats|.3f": "entropy",
    "KL to the old policy, nats|.1e": "kl_old",
    "clipped|.2%": "clipped",
}
""""name|format" of the table -> key of a row."""


@benchmark(runs=0)
def losses(seeds: tuple[int, ...] = (1, 2, 3), runs: int | None = None) -> None:
    """A shortened quickstart with every loss. runs: the most that are done now."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    rows = [json.loads(line) for line in lines]
    present = {(row["loss"], row["seed"]) for row in rows}
    # Seeds in the outer loop: an interrupted study has whole sets of losses.
    missing = [(loss, seed) for seed in seeds for loss in LOSSES if (loss, seed) not in present][:runs]
    for i, (loss, seed) in enumerate(missing, 1):
        rows.append(measure(loss, seed))
        with FILE.open("a", encoding="utf-8") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(f"{i}/{len(missing)}  {loss}, seed {seed}: {rows[-1]['before']:.1%} -> {rows[-1]['after']:.1%}")
    names, formats = zip(*(column.split("|") for column in COLUMNS), strict=True)
    table = Table("loss", "seeds", *names, title=f"{len(rows)} runs")
    for loss in LOSSES:
        of_loss = [row for row in rows if row["loss"] == loss]
        if of_loss:
            columns = ([row[key] for row in of_loss] for key in COLUMNS.values())
            table.row(loss, len(of_loss), *map(_spread, columns, formats))


def measure(loss: str, seed: int) -> dict[str, Any]:
    """One run: its row of the file."""
    with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
        run = train(Path(place), *SETTINGS, f"seed={seed}", *LOSSES[loss])
    evaluated = [r[k] for r in run.rows for k in r if k.startswith("eval/heldout/avg@")]
    clipped = [r.get("policy/clip_frac_high", 0.0) + r.get("policy/clip_frac_low", 0.0) for r in run.steps]
    return {
        "loss": loss,
        "seed": seed,
        "before": evaluated[0],
        "after": evaluated[-1],
        "best": max(evaluated[1:]),
        "entropy": run.steps[-1]["policy/entropy"],
        "kl_old": fmean(r["kl/old"] for r in run.steps),
        "clipped": fmean(clipped),
        "mismatch_max": max(r["mismatch/logp_max"] for r in run.steps),
        "commit": checked_out(),
    }


def _spread(values: list[float], form: str) -> str:
    """Mean (lowest to highest)."""
    between = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{between}"


def checked_out() -> str:
    """The last commit that changed SOURCES, and whether files differ from it."""

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return process.stdout.strip()

    changed = git("status", "--porcelain", "--", *SOURCES)
    return git("log", "-1", "--format=%h", "--", *SOURCES) + "-changed" * bool(changed)


if __name__ == "__main__":
    main(__doc__, losses)

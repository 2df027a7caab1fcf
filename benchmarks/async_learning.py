"""The effect of sampling ahead on learning: the quickstart at several ``rollout.ahead``, corrections and
seeds.

    python -m benchmarks.async_learning                # what is missing of 4 x 3 x 3 runs, then the table
    python -m benchmarks.async_learning --runs 4       # at most four runs
    python -m benchmarks.async_learning --runs 0       # the table only
    python -m benchmarks.async_learning --ahead 4 --correction none --seeds 17

Each run is ``rpg-megatron train examples/quickstart.yaml`` with its 10 steps, evaluated every second step,
and takes about 75 s on two cores. ``none`` is ``correction: null``, for which sampling ahead needs
``guards.uncorrected``. A run's figures are appended to --out as it ends; what is there already for the same
commit is not run again: the last one that changed the package or the quickstart, with ``-changed`` if their
files differ from it.

Accuracy is that of the held-out problems: after the last step, and the best of all evaluations after the
first. KL to the old policy, shares of clipped tokens and those of the correction are means over the steps.
The table has means over seeds and (lowest to highest). A tiny model on arithmetic, in 10 steps of 16 updates,
shows how much the cases differ, not which is better at scale.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "evidence" / "async-learning.jsonl"
SOURCES = ("rpg_megatron", "examples/quickstart", "examples/quickstart.yaml")
AHEAD = (0, 1, 2, 4)
SEEDS = (17, 18, 19)
CORRECTIONS = {
    "truncate": ["correction={type: truncate}"],
    "icepop": ["correction={type: icepop}"],
    "none": [],
}
MEANS = {
    "kl": "kl/old",
    "clip_high": "policy/clip_frac_high",
    "clip_low": "policy/clip_frac_low",
    "clip_c": "policy/clip_frac_c",
    "ratio_mean": "correction/ratio_mean",
    "hit_frac": "correction/hit_frac",
    "lag_mean": "async/lag_mean",
    "entropy": "policy/entropy",
    "mismatch_mean": "mismatch/logp_mean",
}
"""Name in a result -> metric whose mean over the steps it is; left out where the run has no such metric."""
KEY = ("ahead", "correction", "seed")


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ahead", type=int, nargs="+", default=AHEAD)
    parser.add_argument("--correction", choices=CORRECTIONS, nargs="+", default=list(CORRECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--runs", type=int, help="at most so many; the others wait for the next call")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="print the table of this commit, without runs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more settings of the runs")
    a = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run and its folder go, too
    commit = a.commit or checked_out()
    # Seeds in the outer loop: an interrupted series has whole sets of cases.
    cases = [(k, c, s) for s, c, k in itertools.product(a.seeds, a.correction, a.ahead)]
    have = {tuple(row[key] for key in KEY) for row in read(a.out, commit, a.overrides)}
    missing = [] if a.commit else [case for case in cases if case not in have][: a.runs]
    for i, (ahead, correction, seed) in enumerate(missing, 1):
        row = run(ahead, correction, seed, a.overrides) | {"commit": commit}
        a.out.parent.mkdir(parents=True, exist_ok=True)
        with a.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{i}/{len(missing)}  ahead {ahead}, {correction}, seed {seed}: "
            f"{row['before']:.1%} -> {row['after']:.1%} in {row['seconds']:.0f} s",
            flush=True,
        )
    print(table(read(a.out, commit, a.overrides), commit))


def checked_out() -> str:
    """The last commit that changed what a run depends on, and whether files differ from it."""
    head = git("log", "-1", "--format=%h", "--", *SOURCES).strip()
    return head + ("-changed" if git("status", "--porcelain", "--", *SOURCES) else "")


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def read(file: Path, commit: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The results of a commit with these settings."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["commit"] == commit and row["overrides"] == list(overrides)]


def run(ahead: int, correction: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train once; the run's figures."""
    settings = [f"seed={seed}", f"rollout.ahead={ahead}", *CORRECTIONS[correction]]
    settings += ["guards.uncorrected=true"] if ahead and correction == "none" else []
    settings += ["evaluation.every=2", "checkpoint.every=null", "export.enabled=false", *overrides]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rpg-bench-") as work:
        command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(ROOT / "examples/quickstart.yaml")]
        command += ["--fresh", "name=learning", f"runs={work}", *settings]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        }
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
        folder = Path(work) / "learning-001"
        if done.returncode:
            logs = "".join(
                f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in folder.glob("logs/*")
            )
            raise SystemExit(f"{' '.join(settings)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}{logs}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        results = json.loads((folder / "summary.json").read_text())
    steps = [row for row in rows if row["step"]]
    evaluated = [row[key] for row in steps for key in row if key.startswith("eval/heldout/avg@")]
    return {
        "ahead": ahead,
        "correction": correction,
        "seed": seed,
        "overrides": list(overrides),
        "before": results["accuracy_before"]["heldout"],
        "after": evaluated[-1],
        "best": max(evaluated),
        **{n: fmean(found) for n, key in MEANS.items() if (found := [r[key] for r in steps if key in r])},
        "ratio_max": max(row["ratio/max"] for row in steps),
        "lag_max": max(row.get("async/lag_max", 0.0) for row in steps),
        "reward_last": steps[-1]["reward/mean"],
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(done: Sequence[dict[str, Any]], commit: str) -> str:
    """Markdown: a row for each correction and ``ahead``."""

    def cell(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], form: str) -> str:
        found = [value(row) for row in rows]
        spread = f" ({min(found):{form}} to {max(found):{form}})" if len(found) > 1 else ""
        return f"{fmean(found):{form}}{spread}"

    lines = [
        f"quickstart, commit {commit}, {len(done)} runs",
        "",
        "| correction | ahead | seeds | accuracy, % | best, % | KL to the old policy, nats | clipped, % "
        "| corrected, % | mean factor | lag |",
        "|---" * 10 + "|",
    ]
    for correction, ahead in itertools.product(CORRECTIONS, sorted({row["ahead"] for row in done})):
        rows = [row for row in done if (row["correction"], row["ahead"]) == (correction, ahead)]
        if not rows:
            continue
        clipped = cell(rows, lambda r: 100 * (r["clip_high"] + r["clip_low"] + r["clip_c"]), ".2f")
        corrected = factor = "-"
        if correction != "none":
            corrected = cell(rows, lambda r: 100 * r["hit_frac"], ".2f")
            factor = cell(rows, lambda r: r["ratio_mean"], ".3f")
        lines.append(
            f"| {correction} | {ahead} | {len(rows)} | {cell(rows, lambda r: 100 * r['after'], '.1f')} "
            f"| {cell(rows, lambda r: 100 * r['best'], '.1f')} | {cell(rows, lambda r: r['kl'], '.1e')} "
            f"| {clipped} | {corrected} | {factor} | {cell(rows, lambda r: r.get('lag_mean', 0.0), '.2f')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""How settings affect learning: the quickstart with several cases and seeds, each run once and kept as
evidence.

A study's runs are appended to its file in ``docs/evidence`` as they end; runs that are there already are not
repeated, so a study can be stopped and resumed. Its table has means over seeds and (lowest to highest). A
tiny model on arithmetic shows that something trains, and how far cases spread, not which is better at scale.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.setup import ROOT, Report, TrainRun, benchmark, main, train, write_block

SOURCES = ("rpg_megatron", "examples/quickstart", "examples/quickstart.yaml")
"""Files that affect a run."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Cases that are trained with several seeds."""

    file: str
    """Its name in docs/evidence."""
    cases: dict[tuple[Any, ...], list[str]]
    """Values of ``key`` -> settings."""
    key: tuple[str, ...]
    """Fields of a row that name its case."""
    seeds: tuple[int, ...]
    figures: Callable[[TrainRun], Row]
    columns: dict[str, Callable[[Row], float | None]]
    """"name|format" of the table -> value of a run."""
    settings: tuple[str, ...]
    """Settings of all runs."""


def study(
    report: Report,
    study: Study,
    seeds: tuple[int, ...],
    runs: int | None,
    settings: tuple[str, ...],
    commit: str,
) -> str:
    """Do the runs that are missing; returns the table."""
    file = ROOT / "docs" / "evidence" / study.file
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    rows = [r for r in rows if r.get("overrides", []) == list(settings) and commit in ("", r["commit"])]
    present = {(*(r[k] for k in study.key), r["seed"]) for r in rows}
    # Seeds in the outer loop: an interrupted study has whole sets of cases.
    missing = [(case, seed) for seed in seeds for case in study.cases if (*case, seed) not in present][:runs]
    for i, (case, seed) in enumerate(missing, 1):
        overrides = [
            "checkpoint.every=null",
            "export.enabled=false",
            *study.settings,
            f"seed={seed}",
            *study.cases[case],
            *settings,
        ]
        with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
            run = train(Path(place), *overrides)
            evaluated = [r[k] for r in run.rows for k in r if k.startswith("eval/heldout/avg@")]
            row = dict(zip(study.key, case, strict=True)) | {"seed": seed, "overrides": list(settings)}
            row |= {"before": evaluated[0], "after": evaluated[-1], "best": max(evaluated[1:])}
            row |= study.figures(run) | {"commit": checked_out()}
        rows.append(row)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        report.say(f"{i}/{len(missing)}  {case}, seed {seed}: {row['before']:.1%} -> {row['after']:.1%}")
    names, specs = zip(*(column.split("|") for column in study.columns), strict=True)
    table = report.table(*study.key, "seeds", *names, title=f"{len(rows)} runs")
    for case in study.cases:
        cells = []
        of_case = [r for r in rows if tuple(r[k] for k in study.key) == case]
        for value, spec in zip(study.columns.values(), specs, strict=True):
            values = [v for r in of_case if (v := value(r)) is not None]
            spread = f" ({min(values):{spec}} to {max(values):{spec}})" if len(values) > 1 else ""
            cells.append(f"{fmean(values):{spec}}{spread}" if values else None)
        if of_case:
            table.row(*map(str, case), len(of_case), *cells)
    return str(table)


def checked_out() -> str:
    """The last commit that changed SOURCES, and whether files differ from it."""

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return process.stdout.strip()

    return git("log", "-1", "--format=%h", "--", *SOURCES) + (
        "-changed" if git("status", "--porcelain", "--", *SOURCES) else ""
    )


# -- losses --------------------------------------------------------------------------------------------------

RPG = itertools.product(("reinforce", "differentiable"), ("fkl", "ufkl", "rkl", "urkl"))
BASELINES = {
    "GRPO": ["objective={type: grpo}", "advantage.type=grpo", "anchor.type=fixed"],
    "DAPO": ["objective={type: dapo}", "advantage.type=grpo"],
    "REINFORCE++": ["objective={type: reinforce_plus_plus}", "advantage.type=reinforce_plus_plus"],
}
LOSSES = Study(
    file="objectives.jsonl",
    key=("loss",),
    cases={
        (f"RPG-{'REINFORCE-' * (estimator == 'reinforce')}{divergence.upper()}",): [
            f"objective={{type: rpg, divergence: {divergence}, estimator: {estimator}}}"
        ]
        for estimator, divergence in RPG
    }
    | {(name,): settings for name, settings in BASELINES.items()},
    seeds=(1, 2, 3),
    figures=lambda run: {
        "entropy": run.steps[-1]["policy/entropy"],
        "kl_old": run.mean("kl/old"),
        "clipped": run.mean("policy/clip_frac_high", "policy/clip_frac_low"),
        "mismatch_max": max(row["mismatch/logp_max"] for row in run.steps),
    },
    columns={
        "accuracy before|.1%": lambda r: r["before"],
        "after|.1%": lambda r: r["after"],
        "entropy, nats|.3f": lambda r: r["entropy"],
        "KL to the old policy, nats|.1e": lambda r: r["kl_old"],
        "clipped|.2%": lambda r: r["clipped"],
    },
    settings=(
        "training.steps=6",
        "rollout.prompts_per_step=48",
        "evaluation.every=6",
        "evaluation.samples=4",
    ),
)


@benchmark(runs=0)
def losses(
    report: Report, seeds: tuple[int, ...] = LOSSES.seeds, runs: int | None = None, write: bool = False
) -> None:
    """A shortened quickstart with every loss. runs: maximum. write: docs/evidence/objectives.md."""
    table = study(report, LOSSES, seeds, runs, (), "")
    if write:
        write_block("evidence/objectives.md", "learning losses", table)


# -- sampling ahead ------------------------------------------------------------------------------------------

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
"""Field of a row -> metric; the field is its mean over the steps. Left out if the run has no such metric."""
CORRECTIONS = {
    "truncate": ["correction={type: truncate}"],
    "icepop": ["correction={type: icepop}"],
    "none": ["guards.uncorrected=true"],
}
AHEAD = Study(
    file="async-learning.jsonl",
    key=("correction", "ahead"),
    cases={
        (correction, ahead): [f"rollout.ahead={ahead}", *settings]
        for correction, settings in CORRECTIONS.items()
        for ahead in (0, 1, 2, 4)
        if ahead or correction == "truncate"  # the corrections do not differ without lag
    },
    seeds=(17, 18, 19),
    figures=lambda run: {
        **{name: run.mean(metric) for name, metric in MEANS.items() if metric in run.steps[-1]},
        "ratio_max": max(row["ratio/max"] for row in run.steps),
        "lag_max": max(row.get("async/lag_max", 0.0) for row in run.steps),
        "reward_last": run.steps[-1]["reward/mean"],
    },
    columns={
        "accuracy, %|.1f": lambda r: 100 * r["after"],
        "best, %|.1f": lambda r: 100 * r["best"],
        "KL to the old policy, nats|.1e": lambda r: r["kl"],
        "clipped, %|.2f": lambda r: 100 * (r["clip_high"] + r["clip_low"] + r["clip_c"]),
        "corrected, %|.2f": lambda r: 100 * r["hit_frac"] if "hit_frac" in r else None,
        "mean factor|.3f": lambda r: r.get("ratio_mean"),
        "lag|.2f": lambda r: r.get("lag_mean", 0.0),
    },
    settings=("evaluation.every=2",),
)


@benchmark(runs=0)
def ahead(
    report: Report,
    seeds: tuple[int, ...] = AHEAD.seeds,
    runs: int | None = None,
    settings: tuple[str, ...] = (),
    commit: str = "",
) -> None:
    """The quickstart at several ``rollout.ahead`` and corrections; a run takes about 75 s on two cores.

    runs: maximum. commit: of the runs in the table; by default the one that last changed the package.
    """
    study(report, AHEAD, seeds, runs, settings, commit or checked_out())


# -- FP8 -----------------------------------------------------------------------------------------------------

FP8 = Study(
    file="fp8.jsonl",
    key=("precision",),
    cases={("bfloat16",): []}
    | {(name,): [f"precision.fp8={{recipe: {name}}}"] for name in ("blockwise", "tensorwise", "delayed")},
    seeds=(17, 18, 19),
    figures=lambda run: {
        "mismatch_first": run.steps[0]["mismatch/logp_mean"],
        "mismatch_later": fmean(row["mismatch/logp_mean"] for row in run.steps[1:]),
        "mismatch_p99": run.mean("mismatch/logp_p99"),
        "mismatch_max": max(row["mismatch/logp_max"] for row in run.steps),
        "norm": run.mean("policy/grad_norm"),
        "skipped": sum(row["policy/skipped_updates"] for row in run.steps),
    },
    columns={
        "held out, %|.1f": lambda r: 100 * r["after"],
        "mismatch, step 1|.4f": lambda r: r["mismatch_first"],
        "later steps|.4f": lambda r: r["mismatch_later"],
        "p99|.3f": lambda r: r["mismatch_p99"],
        "largest|.2f": lambda r: r["mismatch_max"],
        "gradient norm|.2f": lambda r: r["norm"],
        "skipped|.0f": lambda r: r["skipped"],
    },
    settings=("parallel.tensor=1", "precision.dtype=bfloat16", "guards.mismatch=warn"),
)


@benchmark(runs=0)
def fp8(report: Report, seeds: tuple[int, ...] = FP8.seeds, runs: int | None = None) -> None:
    """The quickstart with each FP8 recipe, emulated on a CPU; the engine samples in bfloat16."""
    study(report, FP8, seeds, runs, (), "")


# -- optimizers ----------------------------------------------------------------------------------------------

OPTIMIZERS = Study(
    file="optimizers.jsonl",
    key=("optimizer",),
    cases={
        ("AdamW",): [],
        ("Muon",): ["optimizer.type=muon", "optimizer.distributed=false"],
    },
    seeds=(17, 18, 19),
    figures=lambda run: {
        "entropy": run.steps[-1]["policy/entropy"],
        "kl_old": run.mean("kl/old"),
        "norm": run.mean("policy/grad_norm"),
    },
    columns={
        "accuracy before, %|.1f": lambda r: 100 * r["before"],
        "after, %|.1f": lambda r: 100 * r["after"],
        "best, %|.1f": lambda r: 100 * r["best"],
        "entropy, nats|.3f": lambda r: r["entropy"],
        "KL to the old policy, nats|.1e": lambda r: r["kl_old"],
    },
    settings=("evaluation.every=2",),
)


@benchmark(runs=0)
def optimizers(
    report: Report, seeds: tuple[int, ...] = OPTIMIZERS.seeds, runs: int | None = None, write: bool = False
) -> None:
    """The quickstart with AdamW and Muon, all else the same. write: as losses."""
    table = study(report, OPTIMIZERS, seeds, runs, (), "")
    if write:
        write_block("evidence/objectives.md", "learning optimizers", table)


if __name__ == "__main__":
    main(__doc__, losses, ahead, fp8, optimizers)

"""What a start or a teacher saves, on the quickstart's task: distillation, RL, and fine-tuning before RL.

Student: the quickstart's model. Teacher: the same model after examples/warm_start.yaml. All arms have the
quickstart's settings: 64 prompts, 8 responses to each, 16 updates a step, learning rate 1e-4. Arms: ``rl``
(quickstart.yaml), ``token`` and ``full`` (distillation without any reward), ``sft, then rl`` (the example,
then the quickstart from its export).

Rules, set before the first run. Held-out accuracy is measured every second step, with four samples of each of
200 problems, at temperature 1. An arm has reached its teacher at the first measurement that is at most two
points below the teacher's own; it costs the tokens that were sampled for training until then. Equal CPU time:
the last measurement before the arm has used a budget of CPU seconds (all its processes, in steps; start-up
and evaluations do not count), which is that of ``rl`` at its tenth step, for each seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.against_trl import watch_processes
from benchmarks.setup import QUICKSTART, Report, TrainRun, Watch, benchmark, main, train

EXAMPLES = QUICKSTART.parent
EVALUATION = ("evaluation.samples=4", "evaluation.every=2", "checkpoint.every=null")
T = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for 95%, by number of seeds."""


@benchmark(seeds=1, steps=2)
def distillation(report: Report, folder: Path, seeds: int = 3, steps: int = 16) -> None:
    """Each arm once for each seed. folder: gets the runs, and a file of rows as they are measured."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    teacher = folder / "teacher" / "bench-001"
    if not (teacher / "hf").exists():
        teacher.parent.mkdir(exist_ok=True)
        train(teacher.parent, "evaluation.samples=4", config=EXAMPLES / "warm_start.yaml")
    goal = _rows(teacher)[-1]["eval/heldout/avg@4"] - 0.02
    distil = f"teacher={{path: {_export(teacher)}}}"
    arms = {
        "rl": (),
        "token": (distil, "objective={type: distil, form: token}"),
        "full": (distil, "objective={type: distil, form: full}"),
    }
    curves: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(17, 17 + seeds):
        for arm, settings in arms.items():
            curves[arm, seed] = _measure(folder / f"{arm}-{seed}", seed, steps, settings)
        start = _measure(folder / f"sft-{seed}", seed, None, (), EXAMPLES / "warm_start.yaml")
        weights = _export(folder / f"sft-{seed}" / "bench-001")
        after = _measure(folder / f"sft-rl-{seed}", seed, steps, (f"model.path={weights}",))
        used = start[-1]["cpu"]
        curves["sft, then rl", seed] = start + [row | {"cpu": row["cpu"] + used} for row in after]
    (folder / "curves.json").write_text(json.dumps([[*key, rows] for key, rows in curves.items()]))
    report.say(f"teacher: {100 * goal + 2:.1f}%; goal {100 * goal:.1f}%")
    columns = (
        "arm",
        "reached by",
        "tokens sampled",
        "accuracy at rl's tenth step's CPU time, %",
        "at the end, %",
    )
    table = report.table(*columns, title=f"{seeds} seeds; mean and 95% interval of the mean")
    names = dict.fromkeys(arm for arm, _ in curves)
    budget = {seed: _at_step(curves["rl", seed], min(10, steps))["cpu"] for _, seed in curves}
    for arm in names:
        rows = {seed: curves[arm, seed] for _, seed in curves if (arm, seed) in curves}
        reached = [
            next((row["tokens"] for row in each if row["accuracy"] >= goal), None) for each in rows.values()
        ]
        got = [tokens for tokens in reached if tokens is not None]
        equal = [
            [row for row in each if row["cpu"] <= budget[seed]][-1]["accuracy"] for seed, each in rows.items()
        ]
        last = [each[-1]["accuracy"] for each in rows.values()]
        tokens = _interval(got, 1e-3, "k") if got else "-"
        table.row(arm, f"{len(got)} of {len(rows)}", tokens, _interval(equal, 100), _interval(last, 100))


def _measure(
    place: Path,
    seed: int,
    steps: int | None,
    settings: tuple[str, ...],
    config: Path = EXAMPLES / "quickstart.yaml",
) -> list[dict[str, float]]:
    """Accuracy, tokens sampled and CPU seconds so far at each evaluation of a run, which is not repeated."""
    saved = place / "curve.json"
    if saved.exists():
        rows: list[dict[str, float]] = json.loads(saved.read_text())
        return rows
    place.mkdir(parents=True, exist_ok=True)
    watches: list[Watch[Any]] = []

    def watch(pid: int) -> None:
        watches.append(watch_processes(pid)[0])
        watches[0].__enter__()

    length = () if steps is None else (f"training.steps={steps}",)
    run: TrainRun = train(
        place, f"seed={seed}", *EVALUATION, *length, *settings, config=config, on_start=watch
    )
    watches[0].__exit__()
    times, used = zip(*watches[0].samples, strict=True)
    rows, cpu, tokens = [], 0.0, 0.0
    for row, end in zip(run.rows, run.ends, strict=True):
        if row["step"]:
            done = end - row.get("time/evaluation", 0.0) - row.get("time/held_out", 0.0)
            first, last = np.interp([done - row["time/step"], done], times, used).tolist()
            cpu += last - first
            responses = 0 if "sft/epoch" in row else 512
            tokens += responses * row.get("response/length_mean", 0.0)
        if "eval/heldout/avg@4" in row:
            accuracy = row["eval/heldout/avg@4"]
            rows.append({"step": row["step"], "accuracy": accuracy, "tokens": tokens, "cpu": cpu})
    saved.write_text(json.dumps(rows))
    return rows


def _at_step(rows: list[dict[str, float]], step: int) -> dict[str, float]:
    return next(row for row in rows if row["step"] >= step)


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _export(run: Path) -> Path:
    return max((run / "hf").iterdir())


def _interval(values: list[float], scale: float, unit: str = "") -> str:
    """Mean and half the 95% interval of the mean."""
    text = f"{scale * mean(values):.1f}{unit}"
    if len(values) < 2:
        return text
    return f"{text} ± {scale * T.get(len(values), 1.96) * stdev(values) / math.sqrt(len(values)):.1f}"


if __name__ == "__main__":
    main(__doc__, distillation)

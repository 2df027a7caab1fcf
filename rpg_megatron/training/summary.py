"""``summary.json``: the results of a run, which the launcher prints. Checkpoints include its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rpg_megatron.config.evaluation import EvaluationSettings
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.system.metrics_file import METRICS


def add_accuracy(summary: dict[str, Any], evaluation: EvaluationSettings, row: dict[str, float]) -> None:
    """Add the accuracies of an evaluation: the first as ``accuracy_before``, the last as ``accuracy_after``.

    row: metrics of the evaluation.
    """
    accuracy = {s.name: row[f"eval/{s.name}/avg@{s.samples}"] for s in evaluation.heldout}
    summary.setdefault("accuracy_before", accuracy)
    summary["accuracy_after"] = accuracy


def write_summary(
    run_dir: Path, summary: dict[str, Any], steps: int, export: Path | None, seconds: float
) -> None:
    """Write the file at the end of a run. summary: includes ``rates``, tokens per second of each step.

    export: folder of the final Hugging Face checkpoint. seconds: total duration of the run over all starts.
    """
    rates = summary.pop("rates")
    summary |= {
        "steps": steps,
        "tokens_per_second": sum(rates) / len(rates),
        "export": None if export is None else str(export),
        "metrics": str(run_dir / METRICS),
        "seconds": seconds,
    }
    atomic_write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

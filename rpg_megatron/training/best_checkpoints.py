"""The best checkpoints by a metric of the evaluation (``checkpoint.keep_best``).

The values are read from ``metrics.jsonl``, which is truncated at the checkpoint when a run resumes: a step
that is trained again is also evaluated again. So no other state needs to be saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.run_folder import CHECKPOINTS, list_steps, remove_old
from rpg_megatron.config import Settings
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.system.metrics_file import METRICS, read_metrics

BEST = "best.json"
"""File in ``checkpoints/``: the metric, and the best existing checkpoints, best first."""


class BestCheckpoints:
    """Ranks evaluated steps by the metric. Used on rank 0. Without ``keep_best`` no step is a best one."""

    def __init__(self, settings: Settings, run_dir: Path):
        """For a resumed run, reads the values of earlier steps."""
        self._checkpoint, self._run_dir = settings.checkpoint, run_dir
        self._wanted = settings.checkpoint.keep_best
        self._values: dict[int, float] = {}
        self.metric = ""
        """Key of the metric."""
        if self._wanted is None or settings.evaluation is None:
            return
        self.metric = self._wanted.metric or settings.evaluation.metric_names()[0]
        for row in read_metrics(run_dir / METRICS):
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Add the value of a row of metrics, if it has one. Step 0 has no checkpoint."""
        value = row.get(self.metric)
        if row["step"] > 0 and isinstance(value, int | float) and math.isfinite(value):
            self._values[int(row["step"])] = float(value)

    def choose(self, steps: Iterable[int]) -> list[int]:
        """At most ``k`` of these steps, best first. With equal values, the earlier step is better."""
        if self._wanted is None:
            return []
        sign = -1 if self._wanted.mode == "max" else 1
        known = sorted((sign * self._values[step], step) for step in steps if step in self._values)
        return [step for _, step in known[: self._wanted.k]]

    def includes(self, step: int) -> bool:
        """Whether a step is among the best so far."""
        return step in self.choose(list(self._values))

    def describe(self, steps: Iterable[int]) -> list[dict[str, Any]]:
        """The best of these steps: ``step``, ``folder`` and ``value``."""
        return [
            {"step": step, "folder": f"step_{step:06d}", "value": self._values[step]}
            for step in self.choose(steps)
        ]

    def summary(self) -> dict[str, Any] | None:
        """The best checkpoint: ``metric``, ``step``, ``folder`` and ``value``; None without one."""
        best = self.describe(list_steps(self._run_dir))
        return {"metric": self.metric, **best[0]} if best else None

    def prune(self) -> None:
        """Write ``BEST`` and remove the checkpoints that are not kept. Raises OSError."""
        best = self.describe(list_steps(self._run_dir))
        if self._wanted is not None:
            content = {"metric": self.metric, "mode": self._wanted.mode, "best": best}
            atomic_write_text(self._run_dir / CHECKPOINTS / BEST, json.dumps(content, indent=2) + "\n")
        remove_old(
            self._run_dir,
            self._checkpoint.keep,
            self._checkpoint.milestone,
            best={item["step"] for item in best},
        )

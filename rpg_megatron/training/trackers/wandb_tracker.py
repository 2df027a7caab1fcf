"""The Weights & Biases tracker."""

from __future__ import annotations

import uuid
from typing import Any

import wandb

from rpg_megatron.config.trackers import WandbSettings
from rpg_megatron.training.trackers.tracker import COLUMNS, FOLDER, TrackedRun


class WandbTracker:
    """A run in Weights & Biases; see ``Tracker``. The key ``step`` is the x axis of all metrics.

    The package's own step counter cannot go back, as needed for the steps that a resumed run repeats.
    """

    def __init__(self, run: TrackedRun, settings: WandbSettings) -> None:
        """Start or resume the run. Raises the package's exceptions: no key, no connection."""
        # Created and saved first, so that a start that is killed while it connects resumes the same run.
        number = run.known_id() or uuid.uuid4().hex[:8]
        run.keep_id(number)
        self._run = wandb.init(
            project=settings.project,
            name=run.name,
            id=number,
            resume="allow",
            dir=str(run.folder / FOLDER),
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float], responses: list[dict[str, Any]]) -> None:
        """See ``Tracker``; the table is the key ``responses``."""
        values: dict[str, Any] = {"step": step, **metrics}
        if responses:
            rows = [[row[column] for column in COLUMNS] for row in responses]
            values["responses"] = wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log(values)

    def close(self) -> None:
        """Upload the remaining data."""
        self._run.finish()

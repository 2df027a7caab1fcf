"""The MLflow tracker."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rpg_megatron.config.files import flatten
from rpg_megatron.config.trackers import MLflowSettings
from rpg_megatron.training.trackers.tracker import COLUMNS, TrackedRun

_LONGEST = 500
"""Maximum characters of a parameter's value: the limit of older servers."""
_AT_ONCE = 100
"""Maximum parameters in a request: MLflow's limit."""
_FORBIDDEN = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow does not allow in names; ``@`` is replaced before."""


class MLflowTracker:
    """A run in MLflow; see ``Tracker``. Settings are logged as parameters and as artifact ``config.json``."""

    def __init__(self, run: TrackedRun, settings: MLflowSettings) -> None:
        """Start or resume the run. Raises the package's exceptions: no connection, no permission."""
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{run.folder.parent.absolute() / 'mlflow.db'}"
        mlflow.set_tracking_uri(uri)
        self._client = mlflow.MlflowClient()
        experiment = self._experiment(settings.experiment, uri)
        where = f"{uri} {settings.experiment}"
        run_id = run.known_id(where)
        # The fluent API, only because it logs system metrics; all other calls pass the run's id.
        started = mlflow.start_run(
            run_id=run_id,
            experiment_id=None if run_id else experiment,
            run_name=None if run_id else run.name,
            log_system_metrics=True,
        )
        self._id = started.info.run_id
        run.keep_id(self._id, where)
        self._client.log_dict(self._id, run.config, "config.json")
        # A parameter cannot be changed: those of the first start are kept.
        parameters = [
            Param(key, str(value)[:_LONGEST])
            for key, value in flatten(run.config).items()
            if key not in started.data.params
        ]
        for start in range(0, len(parameters), _AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + _AT_ONCE])

    def _experiment(self, name: str, uri: str) -> str:
        """Id of the experiment; creates it if it does not exist."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            file = urlsplit(uri).path.removeprefix("/") if uri.startswith("sqlite:") else ""
            # With a database file, artifacts would by default go to the working directory.
            artifacts = (Path(file).absolute().parent / "mlartifacts").as_uri() if file else None
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:  # another run has just created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def log(self, step: int, metrics: dict[str, float], responses: list[dict[str, Any]]) -> None:
        """See ``Tracker``; a step's table is the artifact ``responses/step_NNNNNN.json``."""
        now = int(time.time() * 1000)
        values = [Metric(metric_name(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)
        if responses:
            # The format of MLflow's log_table, which would append the rows of a repeated step.
            rows = [[row[column] for column in COLUMNS] for row in responses]
            table = {"columns": list(COLUMNS), "data": rows}
            self._client.log_dict(self._id, table, f"responses/step_{step:06d}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        mlflow.end_run()


def metric_name(key: str) -> str:
    """A key of metrics.jsonl in characters that MLflow allows: ``avg@4`` becomes ``avg_at_4``."""
    return _FORBIDDEN.sub("_", key.replace("@", "_at_"))

"""Settings of experiment trackers, which log metrics, settings and responses besides the run's folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from rpg_megatron.config.base import IMPORTED, ImportedSettings, Section, tag_of

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Type of tracker -> Python package; the optional dependency of pyproject.toml has the same name."""
RESPONSES, BOARD_RESPONSES = 16, 4
"""Default number of responses in the table of a step, and their number in TensorBoard."""


class TensorBoardSettings(Section, affects="files"):
    """TensorBoard files in <run>/tensorboard: metrics, and a few responses as text."""

    type: Literal["tensorboard"] = "tensorboard"
    """tensorboard, wandb, mlflow, or the import path module:name of your own; docs/trackers.md."""


class TableSettings(Section, affects="files"):
    """A tracker with a table of responses."""

    responses: int = Field(RESPONSES, ge=0, le=1000)
    """Responses in the table of each step; 0: no table."""


class WandbSettings(TableSettings):
    """Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`, never from the settings.

    WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS and WANDB_MODE=offline work as everywhere.
    """

    type: Literal["wandb"]
    """The tracker."""
    project: str = Field("rpg-megatron", min_length=1)
    """Project of the run."""


class MLflowSettings(TableSettings):
    """MLflow. User name, password or token come from MLFLOW_TRACKING_* variables, never from the settings."""

    type: Literal["mlflow"]
    """The tracker."""
    uri: str | None = None
    """Tracking server, such as https://mlflow.example.org, or a file, such as sqlite:////data/mlflow.db.
    null: MLFLOW_TRACKING_URI, and without it the file mlflow.db in the folder of the runs (offline)."""
    experiment: str = Field("rpg-megatron", min_length=1)
    """Experiment of the run; created if it does not exist."""


class ImportedTrackerSettings(ImportedSettings, affects="files"):
    """A tracker of your own, by import path. The other keys are its settings; docs/trackers.md."""


def _parse_name(value: Any) -> Any:
    """``wandb`` is short for ``{type: wandb}``."""
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, dict | BaseModel):
        raise ValueError("must be a name such as wandb, or a section such as {type: wandb, project: math}")
    return value


TrackerSettings = Annotated[
    Annotated[TensorBoardSettings, Tag("tensorboard")]
    | Annotated[WandbSettings, Tag("wandb")]
    | Annotated[MLflowSettings, Tag("mlflow")]
    | Annotated[ImportedTrackerSettings, Tag(IMPORTED)],
    Discriminator(lambda value: tag_of(value, "tensorboard")),
]
"""A tracker selected by ``type``, or a class of your own."""
NamedTracker = Annotated[TrackerSettings, BeforeValidator(_parse_name)]
"""The same, or just its name if there are no other settings."""

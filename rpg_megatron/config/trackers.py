"""Settings of experiment trackers, which log metrics, settings and responses besides the run's folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from rpg_megatron.config.base import IMPORTED, ImportedSettings, Section, tag_of

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Type of tracker -> Python package; the optional dependency of pyproject.toml has the same name."""
RESPONSES = 16
"""Default number of responses in the table of a step."""


class TensorBoardSettings(Section):
    """TensorBoard files in <run>/tensorboard: metrics, and a few responses as text."""

    type: Literal["tensorboard"] = "tensorboard"
    """tensorboard, wandb, mlflow, or the import path module:name of your own; docs/trackers.md."""
    responses: int = Field(4, ge=0, le=100)
    """Responses shown as text for each step; 0: none."""


class WandbSettings(Section):
    """Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`, never from the settings."""

    type: Literal["wandb"]
    """The tracker."""
    project: str = Field("rpg-megatron", min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team; null: your default."""
    group: str | None = None
    """Group of the run; null: none."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    offline: bool = False
    """Write to <run>/trackers/wandb only; `wandb sync` uploads it later."""
    responses: int = Field(RESPONSES, ge=0, le=1000)
    """Responses in the table of each step; 0: no table."""
    system: bool = True
    """Log CPU, memory and GPU use of the first node."""


class MLflowSettings(Section):
    """MLflow. User name, password or token come from MLFLOW_TRACKING_* variables, never from the settings."""

    type: Literal["mlflow"]
    """The tracker."""
    uri: str | None = None
    """Tracking server, such as https://mlflow.example.org, or a file, such as sqlite:////data/mlflow.db.
    null: MLFLOW_TRACKING_URI, and without it the file mlflow.db in the folder of the runs (offline)."""
    experiment: str = Field("rpg-megatron", min_length=1)
    """Experiment of the run; created if it does not exist."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""
    responses: int = Field(RESPONSES, ge=0, le=1000)
    """Responses in the table of each step; 0: no table."""
    system: bool = True
    """Log CPU, memory and GPU use of the first node."""


class ImportedTrackerSettings(ImportedSettings):
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

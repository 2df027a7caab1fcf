"""What every section of the settings shares: frozen, strict, and a docstring under each field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen block of settings. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _RelativeToFile:
    """Marks a path that, in a YAML file, is meant relative to that file and not to the working directory."""


InputPath = Annotated[Path, _RelativeToFile()]
"""A path of something that is read: relative to the YAML file (in key=value, to the working directory)."""

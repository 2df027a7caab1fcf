"""Base class of all sections of the settings: frozen and strict, with a docstring under each field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of settings. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _RelativeToFile:
    """Marks a path that, in a YAML file, is relative to that file and not to the working directory."""


InputPath = Annotated[Path, _RelativeToFile()]
"""Path of an input: relative to the YAML file; in key=value, relative to the working directory."""

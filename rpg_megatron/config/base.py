"""Base class of all sections of the settings: frozen and strict, with a docstring under each field."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, field_validator, model_validator
from pydantic.fields import FieldInfo

NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
"""Names that become part of a path: no hidden file, and no option of a command."""
_LONGEST_PART = 255
"""Maximum bytes of a file's name on Linux."""


What = Literal["training", "results", "sums", "speed", "placement", "files"]
"""What a setting affects. training: what the model learns; the same in all starts of a run. results: what is
sampled or measured, and when the run ends; a run may be resumed with another value. sums: results, by
rounding only, such as the order of summation. speed: time and memory. placement: where processes run. files:
what is written, and where."""


@dataclass(frozen=True)
class Affects:
    """Tag of a setting. Of a field that holds a section, it is the tag of all settings in there."""

    what: What
    evaluated: bool = False
    """Whether an evaluation without trainer (``rpg-megatron eval``) reads the setting."""


class Tagged(BaseModel):
    """Each setting has a tag: that of its own annotation (``Annotated[int, Affects("speed")]``), or that of
    its class (``class MySettings(Section, affects="speed")``). Raises TypeError for a setting with neither.
    """

    affects: ClassVar[Affects | None] = None

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()  # the arguments are those of the next function

    @classmethod
    def __pydantic_init_subclass__(
        cls, affects: What | None = None, evaluated: bool = False, **arguments: Any
    ) -> None:
        super().__pydantic_init_subclass__(**arguments)
        if affects is not None:
            cls.affects = Affects(affects, evaluated)
        for name, field in cls.model_fields.items():
            if cls.affects is None and own_tag(field) is None and not sections_in(field.annotation):
                raise TypeError(f"{cls.__name__}.{name}: give the setting or its class a tag (Affects)")

    @property
    def keywords(self) -> dict[str, Any]:
        """Keys that the class does not have: settings of the user's own code."""
        return dict(self.model_extra or {})


def own_tag(field: FieldInfo) -> Affects | None:
    """The tag in the annotation of a setting."""
    return next((item for item in field.metadata if isinstance(item, Affects)), None)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Section classes inside an annotation such as ``ClipSettings | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [s for arg in get_args(annotation) for s in sections_in(arg)]


class Section(Tagged):
    """A frozen section of settings. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        if isinstance(value, Path) and any(len(os.fsencode(part)) > _LONGEST_PART for part in value.parts):
            raise ValueError(f"a part of this path is longer than {_LONGEST_PART} bytes")
        return value

    def _problems(self) -> Iterator[str]:
        """What is wrong with this section as a whole; the first problem is reported."""
        yield from ()

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self


IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
IMPORTED = "module:name"
"""Tag of a section with an import path in a union, as messages show it."""
BUILT_IN = "built-in"
"""Tag of the section without an import path, in a union of two sections (``built_in_or_imported``)."""


class ImportedSettings(Tagged, affects="training"):
    """Code of your own, by import path. The other keys are its settings; docs/extend.md."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    type: str
    """Import path module:name."""

    @field_validator("type")
    @classmethod
    def _check_import_path(cls, value: str) -> str:
        if not re.fullmatch(IMPORT_PATH, value):
            raise ValueError("must be an import path module:name, such as my_package.my_code:name")
        return value


def tag_of(value: Any, default: str) -> str | None:
    """Tag of a section in a union: its ``type``, or ``IMPORTED`` for an import path.

    default: the ``type`` if the key is missing.
    """
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return IMPORTED if isinstance(kind, str) and ":" in kind else kind if kind is None else str(kind)


def built_in_or_imported(section: type[Section]) -> Any:
    """Annotation of a section whose ``type`` may be an import path; the other keys are then its settings."""

    class Imported(section):  # type: ignore[misc, valid-type]
        """Code of your own. The other keys are its settings; docs/extend.md."""

        model_config = ConfigDict(extra="allow")

    tagged: list[Any] = [Annotated[section, Tag(BUILT_IN)], Annotated[Imported, Tag(IMPORTED)]]
    choose = Discriminator(lambda value: IMPORTED if tag_of(value, BUILT_IN) == IMPORTED else BUILT_IN)
    return Annotated[reduce(or_, tagged), choose]


def tagged_union(base: type[Section], imported: type[ImportedSettings], *, default: str) -> Any:
    """Annotation of a section: a subclass of ``base``, selected by its ``type``, or the user's own code.

    The subclasses are found, not listed, so define them before the call. default: the ``type`` if the key is
    missing.
    """
    tagged: list[Any] = [
        Annotated[section, Tag(name)]
        for section in base.__subclasses__()
        for name in get_args(section.model_fields["type"].annotation)
    ]
    tagged.append(Annotated[imported, Tag(IMPORTED)])
    return Annotated[reduce(or_, tagged), Discriminator(lambda value: tag_of(value, default))]


@dataclass(frozen=True)
class RelativeToFile:
    """Marks a path that is relative to the YAML file it is in, not to the working directory."""

    or_on_hub: bool = False
    """It may also be the id of a model on the Hugging Face hub."""


HubOrInputPath = Annotated[Path, RelativeToFile(or_on_hub=True)]
"""An ``InputPath``, or the id of a model on the Hugging Face hub."""
InputPath = Annotated[Path, RelativeToFile()]
"""Path of an input: relative to the YAML file; in key=value, relative to the working directory."""

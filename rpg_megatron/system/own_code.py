"""Functions and classes of the user, named by import path, with settings that are checked before the call.

Ours are sections of the settings that are called in the same way: ``load_section`` gives either.

``python -m rpg_megatron.system.own_code`` checks some of them: stdin has a JSON list of ``Wanted``, the last
line of stdout a JSON list of problems. A process of its own, since the modules may import torch.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rpg_megatron.config.base import ImportedSettings, Section
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.import_path import load_function


class Wanted(NamedTuple):
    """A function or class of the user, and how it will be called."""

    where: str
    """Key in the settings, for messages."""
    path: str
    """module:name."""
    settings: dict[str, Any]
    """Its keyword arguments."""
    given: int
    """Number of positional arguments of a call, which come before the settings."""
    makes: bool = False
    """A class: it is called with the settings alone, once; the result is what is used."""
    tries: tuple[tuple[Any, ...], ...] = ()
    """Arguments of calls that have to return a finite number of at least 0."""
    names: tuple[str, ...] = ()
    """Keyword arguments of a call, which are not settings."""
    reserved: tuple[str, ...] = ()
    """Keys of the same section that are not passed on: no setting can have one of these names."""


def load_section(
    section: Section | ImportedSettings, where: str, *, given: int, makes: bool = False
) -> Callable[..., Any]:
    """What a section is called as: itself, if it is one of ours, else the user's code that it names.

    Parameters and errors: as in ``Wanted`` and ``load_own``. Calls of the user's code raise UserError, as in
    ``name_errors``.
    """
    if isinstance(section, ImportedSettings):
        wanted = Wanted(where, section.type, section.keywords, given, makes=makes)
        return name_errors(load_own(wanted), where, section.type)
    return typing.cast("Callable[..., Any]", section)


def name_errors(function: Callable[..., Any], where: str, path: str) -> Callable[..., Any]:
    """The same function; its exceptions become a UserError that names the setting, the file and the line.

    where, path: as in ``Wanted``.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except UserError:
            raise
        except Exception as e:
            raise UserError(f"{where}.type: {path} {describe_error(e, path)}") from e

    return call


def describe_error(error: Exception, path: str) -> str:
    """What the user's code raised, with the last line of its module that it passed; one line."""
    file = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    place = f" at {file}:{frames[-1].lineno}" if frames else ""
    message = (str(error).splitlines() or [""])[0]
    return f"fails{place}: {type(error).__name__}: {message}; fix it"


def load_own(wanted: Wanted) -> Callable[..., Any]:
    """Import it and bind its settings; the result is called with the ``given`` positional arguments.

    The settings are the keyword arguments, converted to the types of their annotations; or the fields of a
    pydantic model, if that is the type of the only argument besides the given ones. Raises UserError, one
    line for each problem, for what cannot be imported, an unknown or missing setting, or one of a wrong type.
    """
    where, path = wanted.where, wanted.path
    try:
        function = load_function(path)
    except ValueError as e:
        raise UserError(f"{where}.type: {e}") from None
    bound = _bind(function, wanted)
    if not wanted.makes:
        return bound
    try:
        made = bound()
    except Exception as e:
        raise UserError(
            f"{where}: {path} with these settings fails: {type(e).__name__}: {e}; correct one of the two"
        ) from None
    if not callable(made):
        raise UserError(f"{where}.type: {path} makes a {type(made).__name__} without __call__; add it")
    return typing.cast("Callable[..., Any]", made)


def _bind(function: Callable[..., Any], wanted: Wanted) -> Callable[..., Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C code
        return partial(function, **wanted.settings)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < wanted.given and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UserError(
            f"{wanted.where}.type: {wanted.path} takes {len(positional)} positional arguments, and is called "
            f"with {wanted.given}; see docs/extend.md"
        )
    given = {p.name for p in positional[: wanted.given]} | set(wanted.names)
    own = [p for p in parameters if p.name not in given and p.kind is not p.VAR_POSITIONAL]
    annotated = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
    try:
        hints = typing.get_type_hints(annotated)
    except (NameError, TypeError):  # names that are imported for type checkers only
        hints = {}
    only = hints.get(own[0].name) if len(own) == 1 else None
    if isinstance(only, type) and issubclass(only, BaseModel):
        _check_names(only.model_fields, wanted)
        return partial(function, **{own[0].name: _validate(only, wanted)})
    keywords = [p for p in own if p.kind is not p.VAR_KEYWORD]
    _check_names([p.name for p in keywords], wanted)
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default) for p in keywords
    }
    model: type[BaseModel] = create_model(
        "Settings",
        __config__=ConfigDict(
            extra="forbid" if keywords == own else "allow",
            arbitrary_types_allowed=True,
            protected_namespaces=(),
        ),
        **fields,
    )
    values = _validate(model, wanted)
    return partial(function, **{key: getattr(values, key) for key in wanted.settings})


def _check_names(names: Iterable[str], wanted: Wanted) -> None:
    for name in names:
        if name in wanted.reserved:
            raise UserError(
                f"{wanted.where}.type: {wanted.path} has a setting {name!r}, which is a key of the section "
                "itself; give it another name"
            )


def _validate(model: type[BaseModel], wanted: Wanted) -> BaseModel:
    names = list(model.model_fields)
    unknown = [] if model.model_config.get("extra") == "allow" else set(wanted.settings) - set(names)
    problems = []
    for key in sorted(unknown):
        near = difflib.get_close_matches(key, names, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no settings'}"
        problems.append(f"{wanted.where}.{key}: {wanted.path} has no setting {key!r}; {fix}")
    try:
        values = model.model_validate(wanted.settings)
    except ValidationError as e:
        problems += [p for error in e.errors() for p in _explain(error, wanted, unknown)]
        raise UserError("\n".join(problems)) from None
    if problems:
        raise UserError("\n".join(problems))
    return values


def _explain(error: Any, wanted: Wanted, told: Any) -> Iterator[str]:
    key = ".".join((wanted.where, *map(str, error["loc"])))
    if error["type"] == "missing":
        yield f"{key}: {wanted.path} needs this setting; add it"
    elif not (error["loc"] and error["loc"][0] in told):
        message = error["msg"].removeprefix("Value error, ")
        yield f"{key}: {message} (got {error['input']!r}); {wanted.path} declares it so"


def find_problem(wanted: Wanted) -> str | None:
    """What is wrong with it, in one line for each problem; None: nothing."""
    try:
        function = load_own(wanted)
    except UserError as e:
        return str(e)
    for arguments in wanted.tries:
        call = f"{wanted.path}({', '.join(map(str, arguments))})"
        try:
            value = float(function(*arguments))
        except Exception as e:
            return f"{wanted.where}.type: {call} fails: {type(e).__name__}: {e}; fix the function"
        if not math.isfinite(value) or value < 0:
            return f"{wanted.where}.type: {call} is {value}; it must be a finite number of at least 0"
    return None


def main() -> None:
    """Check what stdin names."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the modules print is not the answer
    problems = [find_problem(Wanted(**item)) for item in json.load(sys.stdin)]
    os.write(answer, json.dumps([p for p in problems if p]).encode())


if __name__ == "__main__":
    main()

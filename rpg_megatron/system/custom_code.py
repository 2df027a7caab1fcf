"""Custom code: functions and classes of the user, named by import path, whose settings are checked.

Built-in ones are sections of the settings, which are callable too: ``load_section`` returns either.

``python -m rpg_megatron.system.custom_code`` checks custom code: stdin is a JSON list of ``CustomCode``, the
last line of stdout is a JSON list of problems. It is a separate process: the modules may import torch.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rpg_megatron.config.base import ImportedSettings, Section
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.system.import_path import load_function

_MAX_PROBLEMS = 20
"""Maximum number of unknown, and of invalid, settings that are listed."""


class CustomCode(NamedTuple):
    """A function or class of the user, and how it will be called."""

    where: str
    """Key in the settings, for messages."""
    path: str
    """``module:name``."""
    settings: dict[str, Any]
    """Keyword arguments from the settings."""
    positional: int
    """Number of positional arguments of each call; they come before the settings."""
    instantiate: bool = False
    """Call it once with the settings alone, as a class; the result is then used."""
    trial_calls: tuple[tuple[Any, ...], ...] = ()
    """Arguments of calls, lists as arrays [N]. The result must be a number of at least 0, or finite [N]."""
    keywords: tuple[str, ...] = ()
    """Keyword arguments of each call that are not settings."""
    reserved: tuple[str, ...] = ()
    """Keys of the same section that are not passed on; no setting can have one of these names."""
    coroutine: bool = False
    """It must be a coroutine function (async def)."""


def load_section(
    section: Section | ImportedSettings, where: str, *, positional: int, instantiate: bool = False
) -> Callable[..., Any]:
    """The callable of a section: a built-in section itself, or the custom code that it names.

    Parameters and errors: as in ``CustomCode`` and ``load_custom``. Calls of custom code raise UserError; see
    ``name_errors``.
    """
    if isinstance(section, ImportedSettings):
        code = CustomCode(where, section.type, section.keywords, positional, instantiate=instantiate)
        return name_errors(load_custom(code), where, section.type)
    return typing.cast("Callable[..., Any]", section)


def name_errors(function: Callable[..., Any], where: str, path: str) -> Callable[..., Any]:
    """Wrap custom code: its exceptions become a UserError that names the setting, the file and the line.

    where, path: as in ``CustomCode``.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except UserError:
            raise
        except Exception as e:
            raise UserError(f"{where}.type: {path} {describe_error(e, path)}") from e

    return call


def describe_error(error: BaseException, path: str) -> str:
    """Exception of custom code and the last line of its module in the traceback, in one line."""
    file = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    place = f" at {file}:{frames[-1].lineno}" if frames else ""
    message = (str(error).splitlines() or [""])[0]
    return f"fails{place}: {type(error).__name__}: {message}; fix it"


def load_custom(code: CustomCode) -> Callable[..., Any]:
    """Import custom code and bind its settings; the result takes the ``positional`` arguments.

    Settings are keyword arguments, converted to the types of their annotations. If the only argument besides
    the positional ones is a pydantic model, they are its fields. Raises UserError, one line for each problem,
    if the import fails, or if a setting is unknown, missing or of a wrong type.
    """
    where, path = code.where, code.path
    try:
        function = load_function(path)
    except ValueError as e:
        raise UserError(f"{where}.type: {e}") from None
    if code.coroutine and not inspect.iscoroutinefunction(function):
        raise UserError(f"{where}.type: {path} is no coroutine function; define it with async def")
    bound = _bind(function, code)
    if not code.instantiate:
        return bound
    try:
        made = bound()
    except Exception as e:
        raise UserError(
            f"{where}: {path} with these settings fails: {type(e).__name__}: {e}; correct one of the two"
        ) from None
    if not callable(made):
        raise UserError(f"{where}.type: {path} creates a {type(made).__name__} without __call__; add it")
    return typing.cast("Callable[..., Any]", made)


def _bind(function: Callable[..., Any], code: CustomCode) -> Callable[..., Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C code
        return partial(function, **code.settings)
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(ordered) < code.positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UserError(
            f"{code.where}.type: {code.path} takes {len(ordered)} positional arguments, and is called "
            f"with {code.positional}; see docs/extend.md"
        )
    passed = {p.name for p in ordered[: code.positional]} | set(code.keywords)
    settings = [p for p in parameters if p.name not in passed and p.kind is not p.VAR_POSITIONAL]
    annotated = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
    try:
        hints = typing.get_type_hints(annotated)
    except (NameError, TypeError):  # names that are imported for type checkers only
        hints = {}
    only = hints.get(settings[0].name) if len(settings) == 1 else None
    if isinstance(only, type) and issubclass(only, BaseModel):
        _check_names(only.model_fields, code)
        return partial(function, **{settings[0].name: _validate(only, code)})
    keywords = [p for p in settings if p.kind is not p.VAR_KEYWORD]
    _check_names([p.name for p in keywords], code)
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default) for p in keywords
    }
    model: type[BaseModel] = create_model(
        "Settings",
        __config__=ConfigDict(
            extra="forbid" if keywords == settings else "allow",
            arbitrary_types_allowed=True,
            protected_namespaces=(),
        ),
        **fields,
    )
    values = _validate(model, code)
    return partial(function, **{key: getattr(values, key) for key in code.settings})


def _check_names(names: Iterable[str], code: CustomCode) -> None:
    for name in names:
        if name in code.reserved:
            raise UserError(
                f"{code.where}.type: {code.path} has a setting {name!r}, which is a key of the section "
                "itself; give it another name"
            )


def _validate(model: type[BaseModel], code: CustomCode) -> BaseModel:
    names = list(model.model_fields)
    unknown = [] if model.model_config.get("extra") == "allow" else set(code.settings) - set(names)
    problems = []
    for key in sorted(unknown)[:_MAX_PROBLEMS]:
        near = difflib.get_close_matches(key, names, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no settings'}"
        problems.append(f"{code.where}.{key}: {code.path} has no setting {key!r}; {fix}")
    try:
        values = model.model_validate(code.settings)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        problems += [p for error in errors[:_MAX_PROBLEMS] for p in _explain(error, code, unknown)]
        raise UserError("\n".join(problems)) from None
    if problems:
        raise UserError("\n".join(problems))
    return values


def _explain(error: Any, code: CustomCode, reported: Any) -> Iterator[str]:
    key = ".".join((code.where, *map(str, error["loc"])))
    if error["type"] == "missing":
        fix = "add it" + " (it is called with its settings alone, as a class)" * code.instantiate
        row = ", or read it from the argument row if it is a column of the data"
        fix += row * (code.where.startswith("reward") and not code.instantiate)
        yield f"{key}: {code.path} needs this setting; {fix}"
    elif not (error["loc"] and error["loc"][0] in reported):
        message = error["msg"].removeprefix("Value error, ")
        yield f"{key}: {message} (got {shorten(repr(error['input']))}); {code.path} declares it so"


def find_problem(code: CustomCode) -> str | None:
    """The problems of custom code, one per line; None if there are none."""
    try:
        function = load_custom(code)
    except UserError as e:
        return str(e)
    for arguments in code.trial_calls:
        import numpy as np  # only here, since a login node may lack it

        wanted = np.shape(arguments[0])
        call = f"{code.path}({'...' if wanted else ', '.join(map(str, arguments))})"
        try:
            values = np.asarray(function(*(map(np.array, arguments) if wanted else arguments)), float)
        except Exception as e:
            return f"{code.where}.type: {call} {describe_error(e, code.path)}"
        fits = values.shape in (wanted, wanted or (1,))
        if not fits or not np.isfinite(values).all() or (not wanted and values < 0):
            wrong = shorten(str(values.tolist())) if fits else f"of shape {values.shape}"
            must = f"for each of {wanted[0]} responses" if wanted else "of at least 0"
            return f"{code.where}.type: {call} is {wrong}; it must be a finite number {must}"
    return None


def main() -> None:
    """Check the custom code listed on stdin."""
    answer = os.dup(1)
    os.dup2(2, 1)  # modules may print to stdout; that must not mix with the result
    problems = [find_problem(CustomCode(**item)) for item in json.load(sys.stdin)]
    os.write(answer, json.dumps([p for p in problems if p]).encode())


if __name__ == "__main__":
    main()

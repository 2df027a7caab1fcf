"""Defaults of the user's own code, so that ``config.yaml`` has every setting of a run.

They are read from the source and nothing is imported: numbers, texts, booleans and None in the signature of a
function or of a class's ``__init__``, or in the fields of a dataclass or pydantic model. A default whose type
is not that of its annotation is left out, because a setting is converted and a default is not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import rpg_megatron
from rpg_megatron.config.base import IMPORTED, tag_of
from rpg_megatron.config.files import read_text
from rpg_megatron.config.secret_values import looks_secret
from rpg_megatron.rewards.custom_reward import INPUTS, RESPONSE
from rpg_megatron.rewards.foreign_functions import FORMS

_POSITIONAL = {"advantage": 3, "schedule": 2, "trackers": 1, "dynamic": 1, "episode": 3}
"""Key of a section -> arguments that a call passes by position; elsewhere none."""


def with_own_defaults[Value](value: Value, key: str = "", *, reward: bool = False) -> Value:
    """A copy of settings in which each section of own code also has the defaults of the settings not given.

    value: a section, or what one contains. key: its key. reward: whether it is within ``reward``.
    """
    if isinstance(value, dict):
        return type(value)((k, with_own_defaults(inner, k, reward=reward)) for k, inner in value.items())
    if isinstance(value, tuple):
        return type(value)(with_own_defaults(inner, key, reward=reward) for inner in value)
    if not isinstance(value, BaseModel):
        return value
    update: dict[str, Any] = {
        name: with_own_defaults(getattr(value, name), name, reward=reward or name == "reward")
        for name in type(value).model_fields
    }
    if type(value).model_config.get("extra") == "allow" and tag_of(value, "") == IMPORTED:
        passed = None if reward else _POSITIONAL.get(key, 0)
        known = {*update, *(value.model_extra or {})}
        defaults = _read_defaults(update["type"], passed)
        update |= {k: v for k, v in defaults if k not in known and not looks_secret(k, v)}
    return value.model_copy(update=update)


def _read_defaults(path: str, positional: int | None) -> Iterator[tuple[str, Any]]:
    """Name and default of each setting of ``module:name``; none if its source is not found.

    positional: number of arguments that come first and are no settings; None: as in ``load_reward``.
    """
    module, _, name = path.partition(":")
    definitions = _find_definitions(module)
    if (definition := definitions.get(name)) is None:
        return
    arguments = list(_arguments(definition))
    if positional is None:
        if any(argument in FORMS for argument, *_ in arguments):
            return  # its arguments are columns, too
        positional = 0
        if not isinstance(definition, ast.ClassDef):
            positional = 0 if any(argument in RESPONSE for argument, *_ in arguments) else 2
            arguments = [each for i, each in enumerate(arguments) if i < positional or each[0] not in INPUTS]
    arguments = arguments[positional:]
    if len(arguments) == 1 and isinstance(arguments[0][1], ast.Name):  # a pydantic model?
        model = definitions.get(arguments[0][1].id)
        arguments = arguments if model is None else list(_fields(model))
    for argument, annotation, default in arguments:
        with suppress(ValueError, TypeError, SyntaxError):
            value = ast.literal_eval(default) if default is not None else ...
            if isinstance(value, bool | int | float | str | None) and _fits(value, annotation):
                yield argument, value


def _find_definitions(module: str) -> dict[str, ast.stmt]:
    """Functions and classes of a module, by name; empty if its source is not found."""
    part = Path(*module.split("."))
    package_root = str(Path(rpg_megatron.__file__).parents[1])
    for folder in (package_root, *sys.path) if module.startswith("rpg_megatron.") else ("", *sys.path):
        for file in (Path(folder, part).with_suffix(".py"), Path(folder, part, "__init__.py")):
            with suppress(OSError, ValueError, SyntaxError):
                return {getattr(node, "name", ""): node for node in ast.parse(read_text(file)).body}
    return {}


Argument = tuple[str, ast.expr | None, ast.expr | None]
"""Name, annotation and default."""


def _arguments(node: ast.stmt) -> Iterator[Argument]:
    """The arguments of a function or class in order; none where a decorator may change them."""
    function: ast.stmt = node
    if isinstance(node, ast.ClassDef):
        decorators = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
        if decorators in (["dataclass"], ["dataclasses.dataclass"]):
            yield from _fields(node)
            return
        function = next((each for each in node.body if getattr(each, "name", "") == "__init__"), node)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not function.decorator_list:
        args = function.args
        ordered = [*args.posonlyargs, *args.args]
        defaults = [*[None] * (len(ordered) - len(args.defaults)), *args.defaults]
        pairs = [*zip(ordered, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        for argument, default in pairs[function is not node :]:  # without self
            yield argument.arg, argument.annotation, default


def _fields(node: ast.stmt) -> Iterator[Argument]:
    """The fields of a dataclass or pydantic model; of ``Field(0.1, ge=0)`` the first argument."""
    for field in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            default = field.value
            if isinstance(default, ast.Call) and ast.unparse(default.func) in ("Field", "pydantic.Field"):
                default = default.args[0] if default.args else None
            yield field.target.id, field.annotation, default


def _fits(value: Any, annotation: ast.expr | None) -> bool:
    return annotation is None or ast.unparse(annotation) == type(value).__name__

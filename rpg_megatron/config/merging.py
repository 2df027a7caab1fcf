"""Reads a config file with the files that it extends, and applies ``key.sub=value`` overrides."""

from __future__ import annotations

import difflib
import functools
import os
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rpg_megatron.config.base import RelativeToFile, sections_in
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.parsing import MAX_YAML, parse_yaml, read_yaml
from rpg_megatron.config.policy import is_hub_id

_MAX_FILES = 100
"""Maximum number of YAML files that a config file leads to, each as often as it is named."""
_MAX_DEPTH = 20
"""Maximum number of dots in the key of an override."""


def read_merged(file: Path, settings: type[BaseModel]) -> dict[str, Any]:
    """Plain values of a YAML file, over those of the files that it extends.

    settings: class of the values, whose input paths are made relative to the file they are in.
    Raises UserError.
    """
    return _read(file, settings, (), [])


def _read(file: Path, settings: type[BaseModel], above: tuple[Path, ...], sizes: list[int]) -> dict[str, Any]:
    """A YAML file merged over the files it extends.

    above: the files that extend this one. sizes: bytes of the files read so far, this one to be added.
    """
    real = Path(os.path.realpath(file))
    if real in above:
        raise UserError(f"{above[-1]}: extends {file}, which extends it again; remove one of the two")
    try:
        raw = _without_aliases(read_yaml(file))
        sizes.append(file.stat().st_size)
    except FileNotFoundError:
        by = f" ({above[-1]} extends it)" if above else ""
        nearby = {each.stem: each.name for each in file.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(file.stem, nearby, n=1)
        fix = (
            f"did you mean {nearby[near[0]]}?"
            if near
            else "give the path of a YAML file, before any KEY=VALUE"
        )
        raise UserError(f"{file}: no such config file{by}; {fix}") from None
    except IsADirectoryError:
        raise UserError(f"{file}: is a directory; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        description = shorten(problem or " ".join(str(e).split()), 500)
        description += "; indent with spaces" * (r"'\t'" in description)
        raise UserError(f"{file}{line}: not valid YAML: {description}") from None
    if len(sizes) > _MAX_FILES or sum(sizes) > MAX_YAML:
        raise UserError(
            f"{file}: extends leads to more than {_MAX_FILES} files or {MAX_YAML:,} bytes, and a file counts "
            "as often as it is named; merge some of them"
        )
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise UserError(f"{file}: must contain keys and values, not a {type(raw).__name__}")
    extended = raw.pop("extends", [])
    names = [extended] if isinstance(extended, str) else extended
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: extends must be a file or a list of files (got {shorten(repr(extended))})")
    _rebase(raw, settings, file.parent)
    merged: dict[str, Any] = {}
    for name in names:
        _merge(merged, _read(file.parent / name, settings, (*above, real), sizes), [settings])
    _merge(merged, raw, [settings])
    return merged


def _without_aliases(value: Any) -> Any:
    """A copy in which no section is in two places: a change of one must not change the other."""
    if isinstance(value, dict):
        return {key: _without_aliases(inner) for key, inner in value.items()}
    return [_without_aliases(inner) for inner in value] if isinstance(value, list) else value


def _merge(
    below: dict[str, Any], above: dict[str, Any], sections: list[type[BaseModel]], *, named: bool = False
) -> None:
    """Merge ``above`` into ``below``, section by section.

    A section with another ``type`` replaces the one below. Null removes the key below, unless null is one of
    its values. sections: classes of the values, or of each of them if they are ``named`` by the user.
    """
    for key, value in above.items():
        before = below.get(key)
        fields = [] if named else [s.model_fields[key] for s in sections if key in s.model_fields]
        if (
            isinstance(value, dict)
            and isinstance(before, dict)
            and value.get("type") in (None, before.get("type"))
        ):
            inner = sections if named else [s for field in fields for s in sections_in(field.annotation)]
            chosen = any(typing.get_origin(field.annotation) is dict for field in fields)
            _merge(before, value, inner, named=chosen)
        elif value is None and key in below and (named or fields) and not any(map(_accepts_null, fields)):
            del below[key]
        else:
            below[key] = value


def merge_section(raw: dict[str, Any], key: str, section: Any, settings: type[BaseModel]) -> Any:
    """Merge a section into plain values at a dotted key, as a file merges what it extends; returns it."""
    parts = key.split(".")
    for part in reversed(parts):
        section = {part: section}
    _merge(raw, section, [settings])
    return functools.reduce(dict.__getitem__, parts, raw)


def _accepts_null(field: FieldInfo) -> bool:
    annotation = field.annotation
    return annotation is Any or type(None) in typing.get_args(annotation)


def apply_override(raw: dict[str, Any], item: str) -> None:
    """Set the value of a ``key.sub=value`` pair. Raises UserError."""
    key, eq, text = item.partition("=")
    shown = shorten(repr(item))
    if not eq or not key:
        raise UserError(f"{shown}: overrides have the form key=value, for example optimizer.lr=1e-5")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise UserError(f"{shown}: the value is not valid YAML; put 'KEY=VALUE' in quotes") from None
    if re.search(r"(^|\s)#", text) and text.lstrip()[:1] not in ("'", '"', "[", "{"):
        raise UserError(f"{shown}: YAML takes # for a comment; quote the value, too: 'KEY=\"...\"'")
    *parents, last = key.split(".")
    if len(parents) > _MAX_DEPTH:
        raise UserError(f"{shown}: a key has at most {_MAX_DEPTH} dots")
    node = raw
    for i, part in enumerate(parents):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"{shown}: {shorten('.'.join(parents[: i + 1]))} is a value, not a section")
        node = child
    node[last] = value


def _rebase(node: dict[str, Any], section: type[BaseModel], folder: Path) -> None:
    """Make the input paths of a YAML file relative to its folder."""
    for name, field in section.model_fields.items():
        value = node.get(name)
        mark = _path_mark(field)
        if isinstance(value, str) and mark is not None:
            on_hub = mark.or_on_hub and is_hub_id(value) and not (folder / value).exists()
            node[name] = value if on_hub else str(folder / value)
        for block in value if isinstance(value, list) else [value]:
            if isinstance(block, dict):
                for inner in sections_in(field.annotation):
                    _rebase(block, inner, folder)


def _path_mark(field: FieldInfo) -> RelativeToFile | None:
    """The mark of an InputPath, or of InputPath | None."""
    marks = [*field.metadata, *(m for arg in typing.get_args(field.annotation) for m in typing.get_args(arg))]
    return next((mark for mark in marks if isinstance(mark, RelativeToFile)), None)

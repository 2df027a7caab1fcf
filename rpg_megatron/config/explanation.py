"""The meaning of each setting for ``--explain``, and messages for invalid settings."""

from __future__ import annotations

import difflib
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rpg_megatron.config.base import BUILT_IN, IMPORTED

_SHOWN = 80
"""Maximum characters of an invalid value in a message."""
_PLAIN = {
    "model_type": "must be a section of keys and values",
    "dict_type": "must be a section of keys and values",
    "tuple_type": "must be a list, such as [a, b]",
    "string_type": "must be text; put it in quotes",
    "invalid_key": "keys must be text",
}
"""Replacements for pydantic's messages that name Python types."""
_PATTERN = "string_pattern_mismatch"
"""Only fields that are names have patterns."""


def explained_yaml(settings: BaseModel, values: dict[str, Any]) -> str:
    """Settings as YAML, with the meaning of each key as a comment above it.

    values: the same settings as plain YAML values.
    """
    return "\n".join(_explained(settings, values, "")) + "\n"


def _explained(section: BaseModel, values: dict[str, Any], indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        meaning = " ".join((field.description or "").split())
        for what, names in (
            ("Keys", [] if inner else _keys_of(field)),
            ("One of", _choices(field.annotation)),
        ):
            if len(names) > 1:
                meaning += f" {what}: {', '.join(names)}."
        yield from textwrap.wrap(meaning, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(inner, BaseModel):
            yield f"{indent}{name}:"
            yield from _explained(inner, values[name], indent + "  ")
        else:
            text = yaml.safe_dump({name: values[name]}, sort_keys=False)
            yield textwrap.indent(text.rstrip("\n"), indent)
    if section.model_extra:  # settings of the user's own code
        yield textwrap.indent(yaml.safe_dump(section.model_extra, sort_keys=False).rstrip("\n"), indent)


def _choices(annotation: Any) -> list[str]:
    """The allowed values of a field, or the types of its section."""
    blocks = sections_in(annotation)
    if len(blocks) > 1:
        tags = [tag for block in blocks for tag in _tags(block)]
        return [] if BUILT_IN in tags else tags  # the explanation of ``type`` lists them
    words = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [str(word) for word in words]
    return [choice for inner in words for choice in _choices(inner)]


def _keys_of(field: FieldInfo) -> list[str]:
    """The keys of the section that a field may hold."""
    return list(dict.fromkeys(key for s in sections_in(field.annotation) for key in s.model_fields))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Section classes inside an annotation such as ``ClipSettings | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [s for arg in typing.get_args(annotation) for s in sections_in(arg)]


def valid_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a section."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from valid_keys(inner, f"{prefix}{name}.")


def explain_error(settings: type[BaseModel], file: str, error: Any) -> str:
    """One line for one validation error of pydantic, starting with the file."""
    parts, siblings = _locate(settings, error["loc"])
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        return f"{file}: {_explain_unknown(settings, parts, siblings)}"
    if error["type"] == "missing":
        return f"{file}: the key {key!r} is missing; add it, or give {key}=... on the command line"
    if error["type"] == "union_tag_invalid":
        known = ", ".join(t.strip("' ") for t in error["ctx"]["expected_tags"].split(","))
        return f"{file}: {key}.type: {error['ctx']['tag']!r} is unknown; use one of {known}"
    if error["type"] == "union_tag_not_found":
        return f"{file}: {key}: must be a section such as {{type: rpg}} (got {_show(error['input'])})"
    message = _PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] == _PATTERN:
        message = "letters, digits, dots, dashes and underscores only"
    if not key:
        return f"{file}: {message}"
    # A message about a whole section names its keys.
    got = "" if isinstance(error["input"], dict) else f" (got {_show(error['input'])})"
    return f"{file}: {key}: {message}{got}"


def _explain_unknown(settings: type[BaseModel], parts: list[str], siblings: list[str]) -> str:
    keys = list(valid_keys(settings))
    key, parent, last = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    if key in keys and last not in siblings:
        kind, block = (
            (f"{parent}.type", f", as in {parent}='{{type: ...}}'") if parent else ("the others", "")
        )
        return (
            f"the key {key!r} does not exist for the chosen {kind}; remove it, or replace the section{block}"
        )
    near = [f"{parent}.{s}".lstrip(".") for s in difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)]
    near = near or [k for k in keys if k.rpartition(".")[2] == last]
    near = near or [f"{parent}.{s}".lstrip(".") for s in difflib.get_close_matches(last, siblings, n=1)]
    near = near or ([] if parent else difflib.get_close_matches(key, keys, n=1))
    if near:
        return f"unknown key {key!r}; did you mean {near[0]!r}?"
    return f"unknown key {key!r}; {parent or 'the settings'} has the keys {', '.join(siblings)}"


def _show(value: Any) -> str:
    """A value as YAML writes it, truncated if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _locate(settings: type[BaseModel], location: tuple[Any, ...]) -> tuple[list[str], list[str]]:
    """The key of an error, without the tags that pydantic puts in for unions, and that key's siblings."""
    sections: list[type[BaseModel]] = [settings]
    parts: list[str] = []
    siblings: list[str] = []
    named = False
    for part in map(str, location):
        if part.isdigit() and parts:  # an index in a list
            parts[-1] += f"[{part}]"
            continue
        if named:  # a key of a dictionary, which the user chooses
            parts.append(part)
            named = False
            continue
        tagged = [s for s in sections if "type" in s.model_fields and part in _tags(s)]
        if tagged and len(sections) > 1:
            sections = tagged
            continue
        siblings = [name for s in sections for name in s.model_fields]
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = [inner for f in fields for inner in sections_in(f.annotation)]
        named = bool(sections) and any(typing.get_origin(f.annotation) is dict for f in fields)
        parts.append(part)
    return parts, siblings


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    if section.model_config.get("extra") == "allow":
        return (IMPORTED,)
    return typing.get_args(section.model_fields["type"].annotation) or (BUILT_IN,)

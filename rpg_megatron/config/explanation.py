"""The meaning of each setting for ``--explain``, and messages for invalid settings."""

from __future__ import annotations

import difflib
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rpg_megatron.config.base import BUILT_IN, IMPORTED, sections_in
from rpg_megatron.config.coming_from import recognize
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.renamed import explain_renamed

_MAX_ERRORS = 20
"""Maximum number of problems of the settings that are listed."""
_MAX_LINE = 1000
"""Maximum characters of one of them."""
_PLAIN = {
    "model_type": "must be a section of keys and values",
    "dict_type": "must be a section of keys and values",
    "tuple_type": "must be a list, such as [a, b]",
    "list_type": "must be a list, such as [a, b]",
    "too_short": "must not be empty",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be one path; for several files of data give their folder, or data.mixture",
    "union_tag_not_found": "must be a section of keys and values",
    "invalid_key": "keys must be text",
    # Only fields that are names have patterns.
    "string_pattern_mismatch": "must be 1 to 128 letters, digits, dots, dashes and underscores; "
    "no dot or dash first",
}
"""Replacements for pydantic's messages that name Python types."""
_KIND = re.compile(r"(bool|int|float|str)$|(constrained|function|literal|tuple|list|dict|set)\W|\[key\]")
"""Kind of value in a union, which pydantic puts into the place of an error."""


def explained_yaml(settings: BaseModel, values: dict[str, Any]) -> str:
    """Settings as YAML, with the meaning of each key as a comment above it.

    values: the same settings as plain YAML values.
    """
    return "\n".join(_explained(settings, values, "", set())) + "\n"


def _explained(
    section: BaseModel, values: dict[str, Any], indent: str, known: set[tuple[str, str]]
) -> Iterator[str]:
    """known: keys that were explained before, with their meaning."""
    for name, field in type(section).model_fields.items():
        inner, meaning = getattr(section, name), _meaning(field)
        known.add((name, meaning))
        yield from _comment(meaning, indent)
        if not inner:
            yield from _explained_keys(field, indent, known)
        if isinstance(inner, BaseModel):
            yield f"{indent}{name}:"
            yield from _explained(inner, values[name], indent + "  ", known)
        else:
            text = yaml.safe_dump({name: values[name]}, sort_keys=False)
            yield textwrap.indent(text.rstrip("\n"), indent)
    if section.model_extra:  # settings of the user's own code
        yield textwrap.indent(yaml.safe_dump(section.model_extra, sort_keys=False).rstrip("\n"), indent)


def _explained_keys(field: FieldInfo, indent: str, known: set[tuple[str, str]]) -> Iterator[str]:
    """The keys of the section that an empty field may hold, with defaults; of ``known`` ones the names."""
    keys: dict[str, FieldInfo] = {}
    for section in sections_in(field.annotation):
        keys |= {key: inner for key, inner in section.model_fields.items() if key not in keys}
    again = [key for key, inner in keys.items() if (key, _meaning(inner)) in known]
    for key, inner in keys.items():
        if key not in again:
            known.add((key, _meaning(inner)))
            yield from _comment(f"{key} ({_default(inner)}): {_meaning(inner)}", indent, "  ")
    if again:
        yield from _comment(f"{', '.join(again)}: as above.", indent, "  ")


def _comment(text: str, indent: str, inset: str = "") -> list[str]:
    first = f"{indent}# {inset}"
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=first + inset)


def _meaning(field: FieldInfo) -> str:
    meaning, choices = " ".join((field.description or "").split()), _choices(field.annotation)
    return f"{meaning} One of: {', '.join(choices)}." if len(choices) > 1 else meaning


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


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


def valid_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a section."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from valid_keys(inner, f"{prefix}{name}.")


def explain_errors(settings: type[BaseModel], file: str, validation: ValidationError) -> str:
    """One line for each of the first errors, starting with the file."""
    errors = validation.errors(include_url=False)
    found: dict[str, tuple[str, str]] = {}  # key -> problem, value
    for error in errors[:_MAX_ERRORS]:
        parts, siblings = _locate(settings, error["loc"])
        key, (text, got) = ".".join(parts), _explain(settings, error, parts, siblings)
        if key in found:  # one for each kind of value that the key may have
            text = f"{found[key][0]}, or {text.removeprefix(f'{key}: ')}"
        found[key] = text, got
    # That a list with a wrong element is no text either is not said.
    keys = [key for key in found if not any(other.startswith((f"{key}[", f"{key}.")) for other in found)]
    lines = [f"{file}: {shorten(''.join(found[key]), _MAX_LINE)}" for key in keys]
    if len(errors) > _MAX_ERRORS:
        lines.append(f"{file}: and {len(errors) - _MAX_ERRORS:,} more problems")
    return "\n".join(lines)


def _explain(settings: type[BaseModel], error: Any, parts: list[str], siblings: list[str]) -> tuple[str, str]:
    """The problem, and the value in parentheses. parts, siblings: see ``_locate``."""
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        return _explain_unknown(settings, parts, siblings, error["input"]), ""
    if error["type"] == "missing":
        return f"the key {key!r} is missing; add it, or give {key}=... on the command line", ""
    if error["type"] == "union_tag_invalid":
        known = ", ".join(t.strip("' ") for t in error["ctx"]["expected_tags"].split(","))
        return f"{key}.type: {_show(error['ctx']['tag'])} is unknown; use one of {known}", ""
    message: str = _PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    if not key:
        return message, ""
    # A message about a whole section names its keys.
    got = "" if isinstance(error["input"], dict) else f" (got {_show(error['input'])})"
    own = dict.fromkeys(k.rpartition(".")[2] for k in valid_keys(settings) if k.rpartition(".")[0] == key)
    if message == _PLAIN["model_type"] and "type" in own and isinstance(error["input"], str):
        message = f"must be a section such as {{type: {error['input']}}}"
    elif message == _PLAIN["model_type"] and own:
        got += f"; it has the keys {', '.join(own)}"
    return f"{key}: {message.replace('Input should be', 'must be')}", got


def _explain_unknown(settings: type[BaseModel], parts: list[str], siblings: list[str], value: Any) -> str:
    keys = list(valid_keys(settings))
    key, parent, last = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    if (gone := explain_renamed(key)) is not None:
        return gone
    if "." in last and key in keys:
        nested = "{".join(f"{part}: " for part in last.split("."))
        return f"{key!r} is one key with dots; in a file, write {nested}...{'}' * last.count('.')}"
    if key in keys and last not in siblings:
        kind, block = (
            (f"{parent}.type", f", as in {parent}='{{type: ...}}'") if parent else ("the others", "")
        )
        return (
            f"the key {key!r} does not exist for the chosen {kind}; remove it, or replace the section{block}"
        )

    same = namesakes(last, keys)
    if not same and (row := recognize(key, value)) is not None:
        return f"unknown key {key!r}; {row}"

    def similar(cutoff: float) -> list[str]:
        close = difflib.get_close_matches(last, siblings, n=1, cutoff=cutoff)
        return [f"{parent}.{name}".lstrip(".") for name in close]

    near = similar(0.7) or same or similar(0.65)
    near = near or ([] if parent else difflib.get_close_matches(key, keys, n=1))
    if near:
        return f"unknown key {key!r}; did you mean {near[0]!r}?"
    where = f"{parent} has" if parent else "the settings have"
    return f"unknown key {key!r}; {where} the keys {', '.join(siblings)}"


def namesakes(name: str, keys: list[str]) -> list[str]:
    """The key of this name in another section; none if many sections have one, such as ``type``."""
    namesakes = [key for key in dict.fromkeys(keys) if key.rpartition(".")[2] == name]
    levels = min((key.count(".") for key in namesakes), default=0)
    highest = [key for key in namesakes if key.count(".") == levels]
    return highest if len(highest) <= 2 else []


def _show(value: Any) -> str:
    """A value as YAML writes it, truncated if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shorten(repr(value))


def _locate(settings: type[BaseModel], location: tuple[Any, ...]) -> tuple[list[str], list[str]]:
    """The key of an error, without the tags that pydantic puts in for unions, and that key's siblings."""
    sections: list[type[BaseModel]] = [settings]
    parts: list[str] = []
    siblings: list[str] = []
    named = False
    for part in (shorten(str(part)) for part in location):
        if part.isdigit() and parts:  # an index in a list
            parts[-1] += f"[{part}]"
            continue
        if parts and not sections and _KIND.match(part):
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

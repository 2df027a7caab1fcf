"""Writes docs/settings.md: every setting, its default and meaning, and whether a resumed run may change it.

    python -m tools.settings_page > docs/settings.md

Texts are those of ``rpg-megatron config FILE --explain``. A test compares the file with the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rpg_megatron.config import Settings
from rpg_megatron.config.affects import tag_of_setting
from rpg_megatron.config.base import sections_in
from rpg_megatron.config.explanation import _meaning, _tags

HEAD = """# Settings

Every setting, by section, with its default and meaning, as `rpg-megatron config FILE --explain` prints them.
A section with a `type` has the keys of that type; where a text depends on it, the type stands in parentheses.
A key marked * may not change when a run is [resumed](running.md#resuming).

This page is generated (`python -m tools.settings_page > docs/settings.md`)."""


def rows(sections: list[type[BaseModel]], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each setting in sections that are alternatives, such as losses."""
    for name in dict.fromkeys(name for section in sections for name in section.model_fields):
        owners = [section for section in sections if name in section.model_fields]
        fields = [section.model_fields[name] for section in owners]
        kinds = [", ".join(_tags(section)) if "type" in section.model_fields else "" for section in owners]
        key = f"{prefix}.{name}" if prefix else name
        inner = list(dict.fromkeys(s for field in fields for s in sections_in(field.annotation)))
        default = by_kind([_shown_default(field, bool(inner)) for field in fields], kinds)
        meaning = by_kind([_meaning(field) for field in fields], kinds)
        if len(fields) == 1 < len(sections):
            meaning += f" ({kinds[0]})" if kinds[0] else ""
        yield key, default, meaning
        yield from rows(inner, key)


def by_kind(texts: list[str], kinds: list[str]) -> str:
    """Different texts, each with the types of section that have it; one text alone stands for all."""
    found: dict[str, list[str]] = {}
    for text, kind in zip(texts, kinds, strict=True):
        found.setdefault(text, []).append(kind)
    if len(found) == 1:
        return texts[0]
    return "; ".join(f"{text} ({', '.join(kinds)})" for text, kinds in found.items() if text)


def _shown_default(field: FieldInfo, section: bool) -> str:
    if field.is_required():
        return "required"
    value = to_jsonable_python(field.get_default(call_default_factory=True))
    if section and isinstance(value, dict):
        return ""
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix('...\n').strip()}`"


def page() -> str:
    """The page: a table for each section, and one of the settings outside of sections."""
    tables: dict[str, list[tuple[str, str, str]]] = {"": []}
    for key, default, meaning in rows([Settings], ""):
        sections = sections_in(Settings.model_fields[key.partition(".")[0]].annotation)
        tables.setdefault(key.partition(".")[0] if sections else "", []).append((key, default, meaning))
    lines = [HEAD]
    for name, table in tables.items():
        first, *others = table if name else [("", "", ""), *table]
        lines += ["", f"## {name or 'The run'}", ""]
        lines += [f"{_linked(first[2])} Default: {first[1] or 'the defaults below'}.", ""] if name else []
        lines += ["| key | default | meaning |", "|---|---|---|"]
        for key, default, meaning in others:
            fixed = " *" if tag_of_setting(key).what == "training" else ""
            cells = (default.replace("|", "\\|"), _linked(meaning).replace("|", "\\|"))
            lines.append(f"| `{key}`{fixed} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    return re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", text.replace("<", "&lt;").replace("*", "\\*"))


if __name__ == "__main__":
    print(page(), end="")

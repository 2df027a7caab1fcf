"""What each setting affects, by its dotted key; for resume, replay, eval, plan --from and study reports."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel

from rpg_megatron.config.base import Affects, What, own_tag, sections_in
from rpg_megatron.config.files import flatten
from rpg_megatron.config.settings import Settings

_STRENGTH: tuple[What, ...] = get_args(What)
_OWN = Affects("training", evaluated=True)
"""Tag of keys that no section has: settings of the user's own code, or of another version."""


@lru_cache(maxsize=4096)  # a report asks for the keys of every run
def tag_of_setting(key: str) -> Affects:
    """The tag of a setting, or the strongest one in a section: the first in the order of ``What``.

    key: dotted, such as ``engine.replicas``.
    """
    tags = list(_tags([Settings], key.split(".") if key else []))
    return min(tags, key=lambda tag: _STRENGTH.index(tag.what)) if tags else _OWN


def _tags(sections: list[type[BaseModel]], parts: list[str]) -> Iterator[Affects]:
    """parts: of the key below these sections, which are alternatives; none: every setting in them."""
    for section in sections:
        for name in parts[:1] or list(section.model_fields):
            field, default = section.model_fields.get(name), getattr(section, "affects", None)
            inner = [] if field is None else sections_in(field.annotation)
            if field is not None and (tag := own_tag(field)) is not None:
                yield tag
            elif not inner:
                if default is not None and (
                    field is not None or section.model_config.get("extra") == "allow"
                ):
                    yield default
            else:
                assert field is not None
                named = any(
                    typing.get_origin(a) is dict for a in (field.annotation, *get_args(field.annotation))
                )
                yield from _tags(inner, parts[2:] if named else parts[1:])


def settings_that_differ(
    then: dict[str, Any], now: dict[str, Any], *what: What
) -> dict[str, tuple[Any, Any]]:
    """Settings with two values, by dotted key, whose tag is one of these; without any, all that differ.

    then, now: settings as nested dicts of plain values.
    """
    old, new = flatten(then), flatten(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (not what or tag_of_setting(key).what in what)
    }

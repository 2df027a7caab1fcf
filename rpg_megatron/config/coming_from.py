"""The tables of docs/coming-from.md: settings of verl, NeMo-RL and TRL beside ours."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rpg_megatron.config.files import read_text

STACKS = ("verl", "NeMo-RL", "TRL")
"""The sections of the page whose tables are read."""
_OURS = re.compile(r"(see )?`([^`:]+)[^`]*`|\u2013")


class ForeignSetting(NamedTuple):
    """One of their settings."""

    stack: str
    name: str
    """Their key; verl's without ``actor_rollout_ref.``. Keys below it belong to it, and * is any text."""
    here: str
    """Our key; empty: not here."""
    same: bool
    """Whether our key takes their value, as it is or converted; else it is a related one."""
    remark: str

    def fits(self, key: str, below: str = r"(\..*)?") -> bool:
        """Whether a key of theirs is this one, or below it."""
        pattern = re.escape(self.name).replace(r"\*", ".*") + below
        return re.fullmatch(pattern, key.removeprefix("actor_rollout_ref.")) is not None

    def __str__(self) -> str:
        is_here = f"is {self.here} here" if self.same else f"is not here{self.here and f'; see {self.here}'}"
        return f"{self.stack}'s {self.name} {is_here}{self.remark and f' ({self.remark})'}"


@cache
def rows() -> tuple[ForeignSetting, ...]:
    """All rows; a row of the page with several names gives one for each."""
    found, stack = [], ""
    for line in read_text(Path(__file__).with_name("coming-from.md")).splitlines():
        if line.startswith("## "):
            stack = line[3:]
        cells = line.strip("|").split("|")
        if stack not in STACKS or len(cells) != 3 or not (names := re.findall(r"`([^`]+)`", cells[0])):
            continue
        ours = list(_OURS.finditer(cells[1]))
        remark = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[2]).replace("`", "").strip()
        for name, our in zip(names, ours * len(names) if len(ours) == 1 else ours, strict=True):
            found.append(ForeignSetting(stack, name, our[2] or "", bool(our[2]) and not our[1], remark))
    return tuple(found)


def find_row(stack: str, key: str) -> ForeignSetting | None:
    """The row of a key of theirs, the most specific one; None: the page does not have it."""
    return max(
        (r for r in rows() if r.stack == stack and r.fits(key)), key=lambda r: len(r.name), default=None
    )


def recognize(key: str, value: Any) -> ForeignSetting | None:
    """The row of a key, or of the first key in its value: the whole key, else its end, else its last part."""
    tail = f".{key.rpartition('.')[2]}"
    while isinstance(value, dict) and value:
        inner, value, tail = *next(iter(value.items())), ""
        key = f"{key}.{inner}"
    ends = [key[m.end() :] for m in re.finditer(r"\.", key)]
    found = sorted((row for row in rows() if row.fits(key)), key=lambda row: -len(row.name))
    found += [row for end in ends for row in rows() if row.name == end]
    return next(iter(found + [row for row in rows() if tail and row.name.endswith(tail)]), None)

"""``rpg-megatron init --from``: the settings of a verl, NeMo-RL or TRL config, by the tables of the docs."""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from rpg_megatron.commands.init.converters import DEFAULTS, convert
from rpg_megatron.config.coming_from import STACKS, find_row, rows
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import read_text
from rpg_megatron.config.merging import apply_override, read_merged
from rpg_megatron.config.parsing import MAX_YAML, parse_yaml
from rpg_megatron.config.settings import Settings, make_settings

_ASSIGNMENT = re.compile(r"(?:\+\+?|export )?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)(?::?-([^${}]*))?\}|\$(\w+)")
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PLACEHOLDERS = {"model.path": "model", "data.path": "train.jsonl"}


class Converted(NamedTuple):
    """A config of ours."""

    text: str
    """run.yaml: what was not taken as comments, then the settings."""
    notes: list[str]
    """The same list for the terminal: counts first."""


def convert_config(file: Path) -> Converted:
    """Our settings for a config of theirs. Raises UserError of one line."""
    leaves = {key.removeprefix("actor_rollout_ref."): value for key, value in _read(file).items()}
    ours_on_top = Settings.model_fields.keys() - {"sft"}
    tops = {s: {r.name.partition(".")[0] for r in rows() if r.stack == s} - ours_on_top for s in STACKS}
    hits = {s: sum(key.partition(".")[0] in tops[s] for key in leaves) for s in STACKS}
    stack = max(hits, key=lambda s: hits[s])
    if not hits[stack]:
        keys = shorten(", ".join(dict.fromkeys(key.partition(".")[0] for key in leaves)) or "none")
        raise UserError(f"{file}: neither verl's, NeMo-RL's nor TRL's: its keys are {keys}; give a GRPO config")
    values = {key: _resolve(value, leaves) for key, value in leaves.items()}
    usable = {k: v for k, v in values.items() if v is not None and "$" not in str(v)}
    given: dict[str, list[Any]] = defaultdict(list)  # our key -> values of their keys, in the page's order
    theirs: dict[str, list[str]] = defaultdict(list)
    for row in rows():
        if row.stack == stack and row.same:
            given[row.here].append((DEFAULTS[stack] | usable).get(row.name))
            theirs[row.here].append(row.name)
    ours, refused = convert(stack, given)
    listed = {name: "" for key in refused for name in theirs[key] if name in leaves}
    ours, problems = _valid(_PLACEHOLDERS | ours, str(file))
    for key, problem in problems.items():
        listed |= {name: problem for name in [n for n in theirs[key] if n in leaves] or [f"here {key}"]}
    counts = {"taken": 0, "off or null": 0, "not taken": 0}
    lines = []
    for key, value in leaves.items():
        row = find_row(stack, key)
        if "$" in str(values[key]):
            reason = "refers to what is not in the file"
        elif values[key] is None or (row and not row.same and value in (False, "", [], {})):
            counts["off or null"] += 1
            continue
        elif row is None:
            reason = "unknown"
        elif row.same and row.name == key and key not in listed:
            counts["taken"] += 1
            continue
        else:
            reason = listed.get(key) or f"{f'see {row.here}; ' if row.here else ''}{row.remark}" or "not here"
        lines.append(f"{key}: {shorten(str(value))}  {reason}")
    lines += [f"{key}: {reason}" for key, reason in listed.items() if key not in leaves]
    lines += [f"here {key}: not in the file; set it" for key, v in _PLACEHOLDERS.items() if ours.get(key) == v]
    lines = ["".join(c if c.isprintable() else " " for c in shorten(line, 400)) for line in lines]
    counts["not taken"] = len(lines)
    notes = [f"{stack}: {', '.join(f'{count} {what}' for what, count in counts.items())}", *lines]
    defaults = ", ".join(f"{k}={v}" for k, v in DEFAULTS[stack].items() if k not in leaves)
    comments = [f"From {file.name}, by docs/coming-from.md. {notes[0]}", f"Defaults there: {defaults}", *lines]
    raw: dict[str, Any] = {}
    for key, value in ours.items():
        apply_override(raw, f"{key}={yaml.safe_dump(value, default_flow_style=True, width=math.inf)}")
    head = "".join(f"# {line}\n" for line in comments)
    return Converted(head + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), notes)

"""``rpg-megatron init --from``: our settings for a config of verl, NeMo-RL or TRL."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from rpg_megatron.commands.init.converters import STACKS, convert
from rpg_megatron.commands.init.foreign_files import is_known, read_leaves
from rpg_megatron.config.coming_from import find_row, rows
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.settings import Settings, make_settings

_OFF: tuple[Any, ...] = (False, "", [], {})
_BACKENDS = ("policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler"), ("policy.megatron_cfg.",)
"""Keys of NeMo-RL that have no effect with Megatron, and without."""

_TUNING = {"sft", "assistant_only_loss", "completion_only_loss", "packing", "max_length"}
_RL = {"grpo", "loss_fn", "reward_funcs", "num_generations", "max_completion_length"}


def convert_config(file: Path) -> tuple[str, list[str]]:
    """The text of a config of ours, and for the terminal counts and what was not taken.

    Raises UserError of one line.
    """
    leaves = read_leaves(file)
    stack = _stack(file, leaves)
    tops = {key.split(".")[0] for key in leaves}
    if (tuning := tops & _TUNING) and not tops & _RL:
        raise UserError(
            f"{file}: {min(tuning)} is a setting of fine-tuning, which --from does not convert; use --task "
            "sft; docs/coming-from.md has the names there and here (Warm start and distillation)"
        )
    defaults, always = STACKS["defaults"][stack], STACKS["always"][stack]
    idle = _BACKENDS[leaves.get("policy.megatron_cfg.enabled") is not True]
    usable = {k: v for k, v in leaves.items() if is_known(v) and not k.startswith(idle)}
    given: dict[str, list[Any]] = defaultdict(list)
    theirs: dict[str, list[str]] = defaultdict(list)
    for entry in (row for row in rows() if row.stack == stack and row.same):
        keys = [k for k, v in usable.items() if entry.fits(k, "") and v not in always.get(k, ())]
        given[entry.here].append(usable[keys[-1]] if keys else defaults.get(entry.name))
        theirs[entry.here] += keys
    ours, refused = convert(stack, given)
    ours, problems = _load(ours, str(file))
    listed = {k: why for key, why in (dict.fromkeys(refused, "") | problems).items() for k in theirs[key]}
    lines, taken = [], 0
    for key, value in leaves.items():
        row = find_row(stack, key)
        same = row is not None and row.same and row.fits(key, "")
        off = (
            value is None
            or value in always.get(key, _OFF if row and not same else ())
            or key.startswith(idle)
        )
        if key not in listed and is_known(value) and (same or off):
            taken += not off
            continue
        reason = f"{'' if same or not row.here else f'see {row.here}; '}{row.remark}" if row else "unknown"
        reason = listed.get(key) or reason if is_known(value) else "refers to what is not in the file"
        lines.append(f"{key}: {shorten(str(value))}  # {reason}")
    left = len(leaves) - len(lines) - taken
    counts = f"{taken} taken, {left} not set, off or always so here, {len(lines)} not taken"
    lines += [f"here {key}: {why}" for key, why in problems.items() if not theirs[key]]
    sources = {"model.path": theirs["model.path"], "data.path": theirs["data.path"] + theirs["data.hub"]}
    sources["reward.type"] = theirs["reward.type"]
    lines += [f"here {key}: not in the file; check it" for key, keys in sources.items() if not keys]
    lines = ["".join(c if c.isprintable() else " " for c in shorten(line, 400)) for line in lines]
    rest = ", ".join(f"{key}={value}" for key, value in defaults.items() if key not in usable)
    head = [f"From {stack}, by docs/coming-from.md: {counts}.", *lines, f"Defaults there, also taken: {rest}"]
    settings = yaml.safe_dump(_nested(ours), sort_keys=False, allow_unicode=True)
    return "".join(f"# {line}\n" for line in head) + settings, [f"{stack}: {counts}", *lines]


def _stack(file: Path, leaves: dict[str, Any]) -> str:
    """The stack that has most of the sections that we do not have."""
    tops, hits = [key.split(".")[0] for key in leaves], {}
    for stack in STACKS["defaults"]:
        names = {row.name.split(".")[0] for row in rows() if row.stack == stack} - set(Settings.model_fields)
        hits[sum(top in names for top in tops)] = str(stack)
    if not max(hits):
        keys = shorten(", ".join(dict.fromkeys(tops)) or "none")
        raise UserError(f"{file}: neither verl's, NeMo-RL's nor TRL's: its keys are {keys}; give another")
    return hits[max(hits)]


def _nested(ours: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for key, value in ours.items():
        *parents, last = key.split(".")
        functools.reduce(lambda section, name: section.setdefault(name, {}), parents, raw)[last] = value
    return raw


def _load(ours: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that load together, and the messages about the others by key."""
    problems: dict[str, str] = {}
    while True:
        try:
            make_settings(_nested(ours), None, where)
            return ours, problems
        except UserError as e:
            line = str(e).splitlines()[0].removeprefix(f"{where}: ")
            section = re.split("[: ]", line)[0] + "."
            named = {key: f"({re.escape(key)}|{re.escape(key.removeprefix(section))})" for key in ours}
            at = {key: re.search(rf"(?<![\w.]){name}(?!\w)", line) for key, name in named.items()}
            found = [(match.start(), key) for key, match in at.items() if match]
            found = found or [(0, key) for key in ours if key.startswith(section)]
            if not found:
                raise
            problems[key := min(found)[1]] = line
            ours = {name: value for name, value in ours.items() if name != key}

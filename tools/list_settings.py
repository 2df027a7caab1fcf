"""Lists every setting with its tag, what each command makes of it, and the number of examples that set it.

``python -m tools.list_settings`` prints a table; its last line counts the settings that
classes declare, and dotted keys.
"""

from __future__ import annotations

from collections import Counter
from inspect import get_annotations
from pathlib import Path

import yaml
from pydantic import BaseModel

from rpg_megatron.config import Settings
from rpg_megatron.config.affects import tag_of_setting
from rpg_megatron.config.base import Affects, sections_in
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.config.files import flatten

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COLUMNS = ("setting", "affects", "resume", "replay", "eval resumed", "eval KEY=VALUE", "study", "examples")


def declared(section: type[BaseModel]) -> set[tuple[type, str]]:
    """(class, field) of all settings, each counted once, where its class declares it."""
    found: set[tuple[type, str]] = set()
    waiting, seen = [section], set()
    while waiting:
        if (current := waiting.pop()) in seen:
            continue
        seen.add(current)
        for name, field in current.model_fields.items():
            owner = next(c for c in current.__mro__ if name in get_annotations(c))
            found.add((owner, name))
            waiting += sections_in(field.annotation)
    return found


def answers(tag: Affects) -> tuple[str, ...]:
    """What resume, replay, eval and the report of a study make of settings with a tag."""
    changes = tag.what in ("training", "results", "sums")
    return (
        "refused" if tag.what == "training" else "may change",
        "rounding" if tag.what in ("training", "sums") else "exact",
        "compared" if changes and tag.evaluated else "free",
        "allowed" if tag.evaluated else "refused",
        "another arm" if tag.what in ("training", "results") else "same arm",
    )


def main() -> None:
    """Print the table and the counts."""
    used: Counter[str] = Counter()
    for file in EXAMPLES.rglob("*.yaml"):
        raw = yaml.safe_load(file.read_text())
        used.update(flatten(raw).keys() if isinstance(raw, dict) else ())
    keys = list(dict.fromkeys(valid_keys(Settings)))
    print("\t".join(COLUMNS))
    for key in keys:
        tag = tag_of_setting(key)
        print("\t".join((key, tag.what, *answers(tag), str(used[key]))))
    print(f"{len(declared(Settings))} settings declared by classes, {len(keys)} dotted keys")


if __name__ == "__main__":
    main()

"""The keys of docs/metrics.md, and those that the code writes, as patterns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROOMS = ("objectives", "policy", "rollout", "training", "evaluation")
_KEY = re.compile(r"[a-z_]+(/[a-z0-9_@*]+)+|lr|step")
_ANY = "*"


def documented() -> list[str]:
    """The keys in the first column of the tables, as written there."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def missing_from_page(rows: Iterable[dict]) -> set[str]:
    """Keys of rows of metrics that the page does not have."""
    patterns = [pattern(key) for key in documented()]
    return {key for row in rows for key in row if not any(p.fullmatch(key) for p in patterns)}


def pattern(key: str) -> re.Pattern[str]:
    """The pattern of a documented key: ``<name>`` matches any name."""
    return re.compile(re.sub(r"<[^>]*>", "[^/]+", re.sub(r"([.@])", r"\\\1", key)))


def written() -> tuple[set[str], set[str]]:
    """Keys that the code writes, with ``*`` for what it puts in; and all its whole strings, likewise.

    The phases of ``time/*`` are the arguments of ``time``.
    """
    strings: set[str] = set()
    phases: set[str] = set()
    words: set[str] = set()
    files = [ROOT / "rpg_megatron" / "rewards" / "reward.py"]
    for room in _ROOMS:
        files += (ROOT / "rpg_megatron" / room).rglob("*.py")
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        strings |= set(_strings(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "time" and node.args:
                phases |= {f"time/{text}" for text in _strings(node.args[0])}
    for file in (ROOT / "rpg_megatron" / "config").rglob("*.py"):  # names of the parts of a reward
        words |= set(_strings(ast.parse(file.read_text(encoding="utf-8"))))
    keys = {text for text in strings if _KEY.fullmatch(text)} - {f"time/{_ANY}"}
    return keys | phases, strings | words


def _strings(tree: ast.AST) -> Iterator[str]:
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else _ANY
                for part in node.values
            )

"""Reads a config of another stack: YAML with references, or a script with the command line."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import read_text
from rpg_megatron.config.merging import read_merged
from rpg_megatron.config.parsing import MAX_YAML, parse_yaml

_WORD = re.compile(r"(?:\+\+?)?([A-Za-z_-][\w.-]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)(?::?-([^${}]*))?\}")
_SUM = re.compile(r"\$\(\((\d{1,9}(?:[+*]\d{1,9})*)\)\)")
_EXPONENT = re.compile(r"[+-]?\d+\.?\d*[eE][+-]?\d+")  # a text for YAML 1.1, a number for Hydra


def read_leaves(file: Path) -> dict[str, Any]:
    """Values by dotted key, verl's without ``actor_rollout_ref.``. Raises UserError of one line."""
    leaves, known = _read_yaml(file) if file.suffix in (".yaml", ".yml") else _read_script(file)
    return {key.removeprefix("actor_rollout_ref."): _resolve(value, known) for key, value in leaves.items()}


def is_known(value: Any) -> bool:
    """Whether a value has no reference that could not be resolved."""
    return "${" not in str(value) and "$(" not in str(value)


def _read_yaml(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    raw, leaves = read_merged(file, BaseModel), {}
    base = file.parent / str(raw.get("defaults"))
    if base.is_file() and base not in above:  # as in NeMo-RL's recipes
        leaves = _read_yaml(base, (*above, base))[0]
        del raw["defaults"]
    leaves |= dict(_flatten(raw))
    return leaves, leaves


def _flatten(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        yield from _flatten(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]


def _resolve(value: Any, known: dict[str, Any]) -> Any:
    """A value without references and sums, as far as they are known."""
    for _ in range(100):
        if not isinstance(value, str):
            return value
        total = _SUM.search(value)
        names = (m for m in _REFERENCE.finditer(value) if known.get(m[1], m[2]) is not None)
        if (found := total or next(names, None)) is None:
            break
        new: Any = known.get(found[1], found[2]) if total is None else _total(total[1])
        value = new if found[0] == value else value[: found.start()] + str(new) + value[found.end() :]
    return float(value) if _EXPONENT.fullmatch(value) else value


def _total(text: str) -> int:
    return sum(math.prod(map(int, part.split("*"))) for part in text.split("+"))


def _read_script(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The words key.key=value of a script, and its variables."""

    def braced(name: re.Match[str]) -> str:
        return f"${{{name[1]}}}" if name[1] else ""

    try:
        text = read_text(file, limit=MAX_YAML).replace("\\\n", " ").replace("$(pwd)", "${PWD}")
        text = re.sub(
            r"\$\(\([^()]*\)\)", lambda m: re.sub(r"\s|(?<![${\w])([A-Za-z_]\w*)", braced, m[0]), text
        )
        words = shlex.split(re.sub(r"\$(\w+)", braced, text), comments=True)
    except (OSError, UnicodeDecodeError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"{file}: cannot be read ({why}); give a YAML file or a shell script") from None
    leaves: dict[str, Any] = {}
    known: dict[str, Any] = {"HOME": str(Path.home()), "PWD": str(Path.cwd())}
    for key, text in (match.groups() for word in words if (match := _WORD.fullmatch(word))):
        value = _resolve(text, known)
        if "." not in key and key[0] != "-":
            known.setdefault(key, str(value))
            continue
        with contextlib.suppress(yaml.YAMLError):
            value = _resolve(parse_yaml(value), {}) if isinstance(value, str) and is_known(value) else value
        leaves[key] = value
    return leaves, known

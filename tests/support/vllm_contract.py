"""What our code relies on in vLLM's sources, and ``tests/data/vllm_contract.jsonl``, which has it as it was.

A row is a function (the arguments that it takes, a digest of its code that comments and docstrings do not
change, and what of ours in bridge/ and rollout/ follows it), a class with attributes that ours reads or sets,
or a file with routes. ``python -m tests.support.vllm_contract`` renews arguments and digests.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

VLLM = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
LOCK = Path(__file__).parents[1] / "data" / "vllm_contract.jsonl"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(file: str) -> ast.Module:
    """A file of vLLM; without any code if it is gone."""
    path = VLLM / file
    return ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")


def functions(file: str) -> dict[str, Function]:
    """Functions and methods (Class.method) of a file."""

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    return dict(walk(parse(file), ""))


def signature(function: Function) -> dict[str, str]:
    """``takes`` and ``digest`` of a row."""
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)] + ([f"*{a.vararg.arg}"] if a.vararg else [])
    names += [x.arg for x in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    code = "\n".join(map(ast.unparse, body))
    return {"takes": " ".join(names), "digest": hashlib.sha256(code.encode()).hexdigest()[:12]}


def attributes(file: str, name: str) -> set[str]:
    """What a class declares in its body, or its methods set."""
    classes = (c for c in parse(file).body if isinstance(c, ast.ClassDef) and c.name == name)
    stored = [n for c in classes for n in ast.walk(c) if isinstance(getattr(n, "ctx", None), ast.Store)]
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in stored if isinstance(n, ast.Name | ast.Attribute)
    }


def rows() -> list[dict[str, str]]:
    """Those of the lock file."""
    return [json.loads(line) for line in LOCK.read_text(encoding="utf-8").splitlines()]


def changes(row: dict[str, str]) -> list[str]:
    """What is not as a row says."""
    file, _, name = row["code"].partition("::")
    if "routes" in row:
        text = (VLLM / file).read_text(encoding="utf-8") if (VLLM / file).exists() else ""
        return [
            f"route {route} is not in {file}" for route in row["routes"].split() if f'"{route}"' not in text
        ]
    if "has" in row:
        return [f"{row['code']} has no {x}" for x in sorted(set(row["has"].split()) - attributes(file, name))]
    function = functions(file).get(name)
    if function is None:
        return [f"{row['code']} is gone. Ours: {row['ours']}"]
    differs = {key: value for key, value in signature(function).items() if row[key] != value}
    return [f"{row['code']} differs: {differs}. Ours: {row['ours']}"] if differs else []


def renew() -> None:
    """Write arguments and digests of the functions that are there."""
    for row in (lines := rows()):
        file, _, name = row["code"].partition("::")
        if "takes" in row and (function := functions(file).get(name)):
            row |= signature(function)
    LOCK.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines), encoding="utf-8")


if __name__ == "__main__":
    renew()

"""Tools that are named without a module: ``calculator``, ``python`` and ``search``.

``python -m rpg_megatron.environments.standard_tools DOCUMENTS.jsonl DATABASE`` makes the database that
``search`` needs.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from rpg_megatron.config.files import open_regular, remove
from rpg_megatron.environments.sandbox import Sandbox, Sandboxes, SandboxLimits, image_problem
from rpg_megatron.environments.tools import ToolError
from rpg_megatron.system.namespaces import find_problem

_LONGEST = 1000
"""Characters of an expression."""
_LARGEST = 4096
"""Bits of an integer."""
_WORDS = 32
"""Words of a query."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "log", "log2", "log10", "exp", "sin", "cos", "tan", "floor", "ceil")
}
_FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": round}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (17 + 4) * 2 ** 3 / sqrt(2)."""
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression has more than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
        return str(
            int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
        )
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError("this is no arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as e:
        raise ToolError(str(e)) from None


class python:
    """Runs programs in a sandbox; the files of an episode's calls stay until it ends."""

    def __init__(
        self,
        seconds: float = 10.0,
        memory_mib: int = 256,
        files_mib: int = 64,
        processes: int = 32,
        image: str = "",
    ):
        """See ``SandboxLimits``. Raises OSError if this machine allows no such sandboxes."""
        if problem := _image_problem(image) if image else _problem():
            raise OSError(problem)
        self._limits = SandboxLimits(seconds, memory_mib, processes, files_mib, image=image)
        self._sandbox: Sandbox | None = None

    async def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints."""
        if self._sandbox is None:
            self._sandbox = await _sandboxes(self._limits).open()
        result = await self._sandbox.exec(["python3", "-"], input=code)
        if result.code != 0:
            reason = f"ended: limit of {result.ended}" if result.ended else f"exit code {result.code}"
            raise ToolError(f"{reason}\n{result.output}")
        return result.output

    def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()


class search:
    """Finds documents in a database made by this module's program."""

    def __init__(self, database: str, results: int = 3, characters: int = 1000):
        """results: most documents of an answer. characters: of each that are shown.

        Raises ValueError if the file is no such database.
        """
        self._path, self._results, self._characters = database, results, characters
        try:
            self._find('"a"')
        except sqlite3.Error as e:
            made = f"python -m {__spec__.name if __spec__ else 'standard_tools'} DOCUMENTS.jsonl DATABASE"
            raise ValueError(f"{database}: {e}; make it with {made}") from None

    def __call__(self, query: str) -> str:
        """Find the documents that best match some words."""
        words = re.findall(r"\w+", query)[:_WORDS]
        if not words:
            raise ToolError("the query has no words")
        found = self._find(" OR ".join(f'"{word}"' for word in words))
        return "\n\n".join(f"{title}\n{text[: self._characters]}" for title, text in found) or "nothing found"

    def _find(self, query: str) -> list[tuple[str, str]]:
        # A connection for each call: calls run in threads.
        with closing(
            sqlite3.connect(f"{Path(self._path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as database:
            rows = database.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
                (query, self._results),
            )
            return [(str(title), str(text)) for title, text in rows]


def make_database(documents: Path, database: Path) -> int:
    """Make the database of ``search``, from lines of JSON with ``title`` and ``text``.

    Returns the number of documents.
    """
    with open_regular(documents) as lines, closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
        rows = (json.loads(line) for line in lines if line.strip())
        return made.executemany(
            "INSERT INTO documents VALUES (?, ?)", ((row.get("title", ""), row["text"]) for row in rows)
        ).rowcount


def _value(node: ast.AST) -> Any:
    """The number that an expression stands for. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _limited(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError("only numbers, + - * / // % **, parentheses and functions such as sqrt are possible")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _LARGEST:
        raise ValueError("the number is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return _limited(result)


def _limited(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _LARGEST:
        raise ValueError("the number is too large")
    return value


_problem, _image_problem = lru_cache(find_problem), lru_cache(image_problem)
_sandboxes = lru_cache(Sandboxes)
"""One for all episodes of the process with the same limits."""


def main() -> None:
    """Make a database."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m {__spec__.name} DOCUMENTS.jsonl DATABASE")
    documents, database = map(Path, sys.argv[1:])
    if database.exists():
        sys.exit(f"{database} exists; remove it, or name another file")
    try:
        print(f"{database}: {make_database(documents, database)} documents")
    except (OSError, ValueError, KeyError, AttributeError) as e:
        remove(database, ignore_errors=True)
        sys.exit(f'{documents}: {type(e).__name__}: {e}; each line must be {{"title": ..., "text": ...}}')


if __name__ == "__main__":
    main()

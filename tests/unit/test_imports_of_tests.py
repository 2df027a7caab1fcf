"""Test modules share code through ``tests/support`` alone, and nothing beside them patches ``sys.path``.

Why: a test file that imports another is renamed, moved and run alone only with it; and a patched ``sys.path``
makes one file two modules, by the order in which tests were collected. And benchmarks, tools and the workers
of tests, which few or slow tests run, import only names that exist. Not covered: names in strings.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(f for folder in ("tests", "benchmarks") for f in (ROOT / folder).rglob("*.py"))


def find_problems(source: str) -> list[str]:
    """Imports of test modules, and whatever changes ``sys.path`` or takes a method of it."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts = {part for name in names for part in name.split(".")}
        problems += sorted(part for part in parts if part.startswith("test_") or part == "conftest")
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node.value) == "sys.path":
            problems.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute):
            stored = isinstance(node.ctx, ast.Store) and ast.unparse(node) == "sys.path"
            problems += [ast.unparse(node)] if stored or node.attr == "syspath_prepend" else []
    return problems


def test_no_test_module_is_imported_and_sys_path_stays() -> None:
    assert len(FILES) > 100
    by_file = {str(f.relative_to(ROOT)): find_problems(f.read_text(encoding="utf-8")) for f in FILES}
    del by_file["tests/support/forking.py"]  # its processes have a path of their own
    assert {file: problems for file, problems in by_file.items() if problems} == {}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from tests.unit.test_launch import Launch", "test_launch"),
        ("from tests.unit import test_launch", "test_launch"),
        ("import test_launch", "test_launch"),
        ("from tests.conftest import QWEN3", "conftest"),
        ("import sys\nsys.path.insert(0, 'x')", "sys.path.insert"),
        ("import sys\nsys.path[:0] = ['x']", "sys.path[:0]"),
        ("import sys\nsys.path += ['x']", "sys.path"),
        ("def f(monkeypatch): monkeypatch.syspath_prepend('x')", "monkeypatch.syspath_prepend"),
    ],
)
def test_both_rules_see_what_breaks_them(source: str, problem: str) -> None:
    assert find_problems(source) == [problem]


@cache
def names_of(module: str) -> set[str]:
    """What can be imported from a module of the package, without importing it."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = (
        {f.stem for f in path.glob("*.py")} | {f.name for f in path.glob("*/")} if path.is_dir() else set()
    )
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_what_benchmarks_tools_and_tests_import_exists() -> None:
    files = [
        file
        for folder in ("benchmarks", "tools", "examples", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    missing, checked = [], 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rpg_megatron":
                available = names_of(str(node.module))
                checked += len(node.names)
                missing += [
                    f"{file.name}: {node.module}.{n.name}" for n in node.names if n.name not in available
                ]
    assert missing == []
    assert checked > 1000

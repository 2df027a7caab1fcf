"""Limits on the size of modules, of functions' arguments and of rooms. Weight is a property of the design.

tools/lines.toml has the limits and the exceptions: what is above a limit today, and may only become smaller.
"""

import ast
import tomllib
from pathlib import Path

import pytest

from tools.lines import PACKAGE, TABLE, VENDORED, count_lines, lines_by_folder, source_files

MODULE, ARGUMENTS, COMMAND = 400, 7, 800
"""Most lines of a module, arguments of a function without self, lines of a command that is not listed."""
NEAR = 15
"""Lines by which an exception may be larger than its module: a change may come back."""
CONFIG = tomllib.loads(TABLE.read_text())


def modules() -> dict[str, int]:
    return {str(f.relative_to(PACKAGE)): count_lines(f) for f in source_files((".py", ".js"))}


def arguments() -> dict[str, int]:
    """``module:function`` -> number of its arguments, for all functions with more than the limit.

    A method that overrides another package's has no choice, and typer reads options from arguments.
    """
    found = {}
    for file in source_files((".py",)):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            if count > ARGUMENTS:
                key = f"{file.relative_to(PACKAGE)}:{node.name}"
                found[key] = max(count, found.get(key, 0))
    return found


def test_modules_are_small() -> None:
    allowed = CONFIG["modules"]
    large = {name: count for name, count in modules().items() if count > MODULE}
    assert large.keys() == allowed.keys(), f"more than {MODULE} lines: {large}; tools/lines.toml: {allowed}"
    for name, count in large.items():
        assert count <= allowed[name], f"{name} has {count} lines, not {allowed[name]}: make it smaller"
        assert allowed[name] <= count + NEAR, f"tools/lines.toml: {name} has {count} lines now; lower it"


def test_functions_have_few_arguments() -> None:
    assert arguments() == CONFIG["functions"], f"more than {ARGUMENTS} arguments; use a dataclass"


@pytest.mark.parametrize("room", sorted({*lines_by_folder(), *CONFIG["limits"]}))
def test_commands_keep_their_limits(room: str) -> None:
    limit = CONFIG["limits"].get(room, COMMAND if room.startswith("commands/") else None)
    assert limit is None or lines_by_folder()[room] <= limit, f"{room}: make it smaller"


def test_files_of_others_are_not_counted(tmp_path: Path) -> None:
    assert not any(VENDORED in file.parts for file in source_files((".js",)))
    assert sum(lines_by_folder().values()) == sum(modules().values())

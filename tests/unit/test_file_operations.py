"""Only ``config/files.py`` copies, renames and removes files, and only listed modules open some without it.

Why: a copy through a planted link, or a removal through one, is one careless ``shutil.copyfile`` away. That
module has the checks, and each exception here says why it needs none. Not covered: libraries that are given
a path (safetensors, pyarrow's metadata, tokenizers, Megatron, tensorboard), and files that vLLM opens.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rpg_megatron"

CHANGES = {
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree"},
    "os": {
        "unlink",
        "remove",
        "rename",
        "renames",
        "replace",
        "open",
        "symlink",
        "link",
        "truncate",
        "chmod",
    },
}
METHODS = {"unlink", "rename", "symlink_to", "hardlink_to", "chmod"}
"""Of a Path. ``replace`` too, with one argument: that of a string has two."""
READS = {"read_text", "read_bytes", "write_text", "write_bytes"}

MAY_CHANGE = {
    "bridge/vllm/cpu_engine.py": "opens /dev/null",
    "config/files.py": "the module",
    "environments/images.py": "modes of folders of an image, in its part of the cache",
    "environments/image_root.py": "in a sandbox's folder, while no program runs there",
    "environments/sandbox_process.py": "in a sandbox's folder, while no program runs there",
    "system/sandbox.py": "tries to open /dev/null, for doctor",
    "system/terminal.py": "opens /dev/null",
}
MAY_OPEN = {
    "config/files.py": "the module",
    "commands/convert/command.py": "/proc",
    "commands/doctor/gpu.py": "/proc, and a new folder of its own, mode 0700",
    "commands/init/command.py": "files of this package",
    "commands/plan/gpus.py": "/sys",
    "commands/report/render.py": "files of this package",
    "data/prompts.py": "in the run's work folder, mode 0700",
    "engine/server.py": "metadata of installed packages",
    "environments/harbor.py": "a file in memory",
    "environments/image_root.py": "/proc, and in a sandbox's folder, while no program runs there",
    "environments/sandbox_limits.py": "/proc",
    "environments/sandbox_process.py": "/proc, and in a sandbox's folder, while no program runs there",
    "environments/standard_tools.py": "opens a sandbox",
    "launcher/environment.py": "/proc, and the user's own code, which runs anyway",
    "policy/device.py": "/sys",
    "system/process_groups.py": "/proc",
    "system/process_tree.py": "/proc",
}
"""Modules that read or write some file without ``config/files.py``, and why others cannot touch it."""


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a file, with the name that is called: ``os.open``, ``.unlink``, ``open``."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in CHANGES:
            for alias in node.names:  # as if called
                yield f"{node.module}.{alias.name}", ast.Call(ast.Name("_"), [], [])
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CHANGES
        ):
            yield f"{node.value.id}.{node.attr}", ast.Call(ast.Name("_"), [], [])  # also if passed on
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id in CHANGES):
                yield f".{node.func.attr}", node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def changes_files(name: str, call: ast.Call) -> bool:
    module, _, attribute = name.rpartition(".")
    if module:
        return attribute in CHANGES[module]
    one_argument = len(call.args) == 1 and not call.keywords
    return name.startswith(".") and (attribute in METHODS or (attribute == "replace" and one_argument))


def opens_files(name: str, call: ast.Call) -> bool:
    """Also ``.open()`` without arguments or with a mode; other methods of that name take other objects."""
    by_mode = not call.args or isinstance(call.args[0], ast.Constant)
    method = name.removeprefix(".") if name.startswith(".") else ""
    return name == "open" or method in READS or (method == "open" and by_mode)


def file_calls(file: Path) -> tuple[list[str], list[str]]:
    all_calls = list(calls(file))
    return (
        sorted({name for name, call in all_calls if changes_files(name, call)}),
        sorted({name for name, call in all_calls if opens_files(name, call)}),
    )


MODULES = {str(f.relative_to(PACKAGE)): file_calls(f) for f in sorted(PACKAGE.rglob("*.py"))}


def test_files_are_changed_by_one_module() -> None:
    modules = {name: changes for name, (changes, _) in MODULES.items() if changes}
    assert sorted(modules) == sorted(MAY_CHANGE), modules


def test_files_are_opened_by_one_module() -> None:
    modules = {name: opens for name, (_, opens) in MODULES.items() if opens}
    assert sorted(modules) == sorted(MAY_OPEN), modules


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import shutil\nshutil.rmtree(x)", (True, False)),
        ("undo.callback(shutil.rmtree, x)", (True, False)),
        ("from os import replace", (True, False)),
        ("path.unlink(missing_ok=True)", (True, False)),
        ("path.replace(other)", (True, False)),
        ("text.replace('a', 'b')", (False, False)),
        ("shutil.which('x'), os.path.join(a, b), os.getpid()", (False, False)),
        ("path.open('a')", (False, True)),
        ("open(x)", (False, True)),
        ("path.read_text(encoding='utf-8')", (False, True)),
        ("reader.open(place, version), read_text(path), open_own(path)", (False, False)),
    ],
)
def test_what_counts_as_such_a_call(tmp_path: Path, code: str, expected: tuple[bool, bool]) -> None:
    file = tmp_path / "module.py"
    file.write_text(code)
    changes, opens = file_calls(file)
    assert (bool(changes), bool(opens)) == expected

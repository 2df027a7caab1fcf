"""Imports between rooms point downwards, no files import each other in a circle, and each process imports
only what it needs before its work starts.

Why: who reads a room then needs to know only those below it, and every file can be read before those that
use it. Lazy imports within functions count as well. A launcher or a reward worker that imports torch takes
seconds more to start and 300 MiB more. Not covered: names in strings, such as the modules that other
processes run; what is imported later, when it is needed.
"""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.draw_architecture import ROOMS, draw, read_imports, rooms_below

IMPORTS = read_imports()


def room(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


def test_every_folder_is_a_room() -> None:
    assert {name.partition(".")[0] for name in IMPORTS} == set(ROOMS)


def test_imports_point_downwards() -> None:
    upwards = {(a, b) for a, imported in IMPORTS.items() for b in imported if room(b) < room(a)}
    assert upwards == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as e:
        raise AssertionError(f"a circle: {' -> '.join(e.args[1])}") from None


def test_the_picture_is_that_of_the_code() -> None:
    file = Path(__file__).parents[2] / "docs" / "architecture.svg"
    assert file.read_text(encoding="utf-8") == draw(rooms_below(IMPORTS)), (
        "python tools/draw_architecture.py > docs/architecture.svg"
    )


NEVER = ("torch", "vllm", "megatron", "transformers", "datasets")
ARRAYS = ("numpy", "pyarrow")
LAUNCHER = (*NEVER, *ARRAYS, "httpx", "asyncio", "tokenizers", "sympy")
BARE = (*LAUNCHER, "pydantic", "yaml", "rich", "psutil")


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("config", LAUNCHER),
        ("cli", BARE),
        ("commands.train", LAUNCHER),
        ("commands.eval.command", LAUNCHER),
        ("commands.doctor.command", LAUNCHER),
        ("commands.plan.command", LAUNCHER),
        ("commands.grade", LAUNCHER),
        ("commands.report.render", LAUNCHER),
        ("commands.audit.command", NEVER),
        ("commands.replay.command", NEVER),
        ("launcher.node_agent", LAUNCHER),
        ("launcher.reaper", BARE),
        ("system.parent_death", BARE),
        ("system.fork_server", BARE),
        ("rewards.math_verify_worker", (*NEVER, *ARRAYS, "pydantic")),
        ("rollout.sampler", NEVER),
        ("commands.eval.process", NEVER),
    ],
)
def test_what_a_process_does_without_until_its_work_starts(module: str, without: tuple[str, ...]) -> None:
    code = f"""
import importlib, sys
module = importlib.import_module("rpg_megatron.{module}")
if {module!r} == "cli":
    try:
        module.main(["--help"])
    except SystemExit:
        pass
print("IMPORTED", [name for name in {without!r} if name in sys.modules])
"""
    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "IMPORTED []"

"""Imports between rooms point downwards, and no files import each other in a circle.

Why: who reads a room then needs to know only those below it, and every file can be read before those that
use it. Lazy imports within functions count as well. Not covered: names in strings, such as the modules that
other processes run.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.draw_architecture import ROOMS, draw, read_imports, rooms_below

IMPORTS = read_imports()


def room(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


def test_every_folder_is_a_room() -> None:
    assert {name.partition(".")[0] for name in IMPORTS} == set(ROOMS)


def test_imports_point_downwards() -> None:
    upwards = {(a, b) for a, asked in IMPORTS.items() for b in asked if room(b) < room(a)}
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

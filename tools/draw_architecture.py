"""Draws docs/architecture.svg: the rooms of the package and which imports which, read from the code.

    python tools/draw_architecture.py > docs/architecture.svg

A package is drawn above all that it imports. Transitive arrows are omitted. A test compares the file with the
output of this script.
"""

from __future__ import annotations

import ast
import html
import textwrap
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rpg_megatron"
ROOMS = (
    "cli",
    "commands",
    "launcher",
    "training",
    "environments",
    "rollout",
    "evaluation",
    "policy",
    "rewards",
    "engine",
    "bridge",
    "checkpoints",
    "data",
    "system",
    "models",
    "config",
    "objectives",
)
"""From the top: imports point downwards. CONTRIBUTING.md has the same order."""

_WIDTH, _HEIGHT, _GAP, _ROW = 196, 74, 20, 116
_PAGE = 5 * _WIDTH + 4 * _GAP + 40


def read_imports() -> dict[str, set[str]]:
    """Each module of the package -> those of the package that it imports, without the package's name.

    Lazy imports within functions count as well.
    """
    files = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): p for name, p in files.items() if name != "__init__"}
    prefix = "rpg_megatron."
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            asked: list[str] = []
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
                asked = [f"{node.module}.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                asked = [a.name for a in node.names if a.name.startswith(prefix)]
            for full in asked:
                module = full.removeprefix(prefix)
                found[name].add(module if module in files else module.rpartition(".")[0])
    return {name: asked - {name, ""} for name, asked in found.items()}


def room_of(module: str) -> str:
    """The room that a module is in."""
    return module.partition(".")[0]


def rooms_below(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Each room -> the rooms below it that it imports; upward imports are left out."""
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, asked in imports.items():
        for other in asked:
            if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module)):
                below[room_of(module)].add(room_of(other))
    return below


def draw(below: dict[str, set[str]]) -> str:
    """The picture, as SVG."""
    reached: dict[str, set[str]] = {}
    for room in reversed(ROOMS):
        reached[room] = below[room].union(*(reached[other] for other in below[room]))
    level = dict.fromkeys(ROOMS, 0)
    """Rows from the top: each room right below the last of those that import it."""
    for room in ROOMS:
        for other in below[room]:
            level[other] = max(level[other], level[room] + 1)
    places = {}
    rows = max(level.values()) + 1
    for i in range(rows):
        row = [room for room in ROOMS if level[room] == i]
        left = (_PAGE - len(row) * _WIDTH - (len(row) - 1) * _GAP) / 2
        for j, room in enumerate(row):
            places[room] = left + j * (_WIDTH + _GAP), 20 + i * _ROW
    height = 20 + (rows - 1) * _ROW + _HEIGHT + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_PAGE} {height}" width="{_PAGE}" '
        'font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
        f'<rect width="{_PAGE}" height="{height}" fill="#ffffff"/>',
    ]
    for room in ROOMS:
        direct = below[room] - set().union(*(reached[other] for other in below[room]))
        lines += _arrows(sorted(direct, key=lambda other: places[other]), places[room], places)
    for room, (x, y) in places.items():
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" '
            'fill="#eef3fb" fill-opacity="0.85" stroke="#4a6fa5"/>'
        )
        lines.append(f'<text x="{x + 12:g}" y="{y + 22:g}" font-size="15" font-weight="bold">{room}</text>')
        for i, text in enumerate(textwrap.wrap(_owns(room), 28)[:3]):
            lines.append(
                f'<text x="{x + 12:g}" y="{y + 39 + 14 * i:g}" font-size="11">{html.escape(text)}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _arrows(
    others: list[str], place: tuple[float, float], places: dict[str, tuple[float, float]]
) -> Iterable[str]:
    """From one room to others; dashed where they lie further down than the next row."""
    x, y = place
    for i, other in enumerate(sorted(others, key=lambda other: places[other][0])):
        to_x, to_y = places[other]
        start = x + _WIDTH * (i + 1) / (len(others) + 1), y + _HEIGHT
        end = to_x + _WIDTH * (0.5 + 0.4 * max(-1.0, min(1.0, (x - to_x) / _PAGE))), to_y - 1
        bend = (end[1] - start[1]) * 0.45
        dashes = ' stroke-dasharray="4 4"' if to_y - y > _ROW else ""
        yield (
            f'<path d="M{start[0]:.1f} {start[1]:.1f}C{start[0]:.1f} {start[1] + bend:.1f} '
            f'{end[0]:.1f} {end[1] - bend:.1f} {end[0]:.1f} {end[1]:.1f}" fill="none" stroke="#7a8699" '
            f'stroke-width="1.5"{dashes} marker-end="url(#tip)"/>'
        )


def _owns(room: str) -> str:
    """What a room says of itself: the first sentence of its docstring."""
    file = PACKAGE / room / "__init__.py"
    text = ast.get_docstring(
        ast.parse((file if file.exists() else PACKAGE / f"{room}.py").read_text("utf-8"))
    )
    return (text or "").split(". ")[0].split("\n")[0].rstrip(".").replace("``", "")


if __name__ == "__main__":
    print(draw(rooms_below(read_imports())), end="")

"""Prints lines by folder beside those of the last release, and their limits: part of ``make lint``.

``python tools/lines.py --renew`` writes today's figures into tools/lines.toml, at a release. The limits and
exceptions in that file are held by tests/unit/test_lines.py.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "lines.toml"
PACKAGE = ROOT / "rpg_megatron"
VENDORED = "vendor"
"""Name of folders with files of others, which are not counted."""


def source_files(suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Our files of the package with one of these suffixes, sorted."""
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in suffixes and VENDORED not in file.relative_to(PACKAGE).parts:
            yield file


def count_lines(file: Path) -> int:
    """Lines of a text file, as ``wc -l`` counts them."""
    return file.read_bytes().count(b"\n")


def folder_of(file: Path) -> str:
    """The room of a file: its first folder, of commands also the command."""
    parts = file.relative_to(PACKAGE).parts
    inner = parts[:2] if parts[0] == "commands" else parts[:1]
    return "/".join(inner).removesuffix(file.suffix if len(inner) == len(parts) else "")


def lines_by_folder() -> dict[str, int]:
    """Folder -> lines of Python; ``commands/report (js)`` and the like -> lines of JavaScript."""
    counts: dict[str, int] = {}
    for file in source_files((".py", ".js")):
        name = folder_of(file) + (" (js)" if file.suffix == ".js" else "")
        counts[name] = counts.get(name, 0) + count_lines(file)
    return dict(sorted(counts.items()))


def main() -> None:
    """Print the table, or renew it."""
    table, now = tomllib.loads(TABLE.read_text()), lines_by_folder()
    if "--renew" in sys.argv:
        release = "\n".join(f'"{name}" = {count}' for name, count in now.items())
        text = re.sub(r"(?s)(?<=\[release\]\n).*?(?=\n\n\[|\Z)", release, TABLE.read_text())
        TABLE.write_text(text)
        return
    then, limits = table["release"], table["limits"]
    print(f"{'lines':24}{'release':>9}{'now':>9}{'limit':>9}")
    for name in sorted({*then, *now}):
        limit = limits.get(name, "")
        print(f"{name:24}{then.get(name, 0):>9,}{now.get(name, 0):>9,}{limit:>9}")
    print(f"{'sum':24}{sum(then.values()):>9,}{sum(now.values()):>9,}")


if __name__ == "__main__":
    main()

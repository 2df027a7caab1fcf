"""The console for tables."""

from __future__ import annotations

import os

from rich.console import Console

from rpg_megatron.system.console import PlainTextConsole

_WIDE = 1000
"""Width in a pipe or file: more than any row."""


def table_console(width: int = _WIDE) -> Console:
    """Standard output. Rows are wrapped at the terminal's width, in a pipe at COLUMNS, else at ``width``."""
    console = PlainTextConsole()
    return console if console.is_terminal or "COLUMNS" in os.environ else PlainTextConsole(width=width)

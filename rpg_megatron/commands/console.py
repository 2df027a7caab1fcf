"""The console that tables are printed on."""

from __future__ import annotations

import os

from rich.console import Console

_WIDE = 1000
"""Columns in a pipe or file: more than a row has."""


def table_console() -> Console:
    """Standard output. Rows are wrapped at the terminal's width; in a pipe only if COLUMNS sets one."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)

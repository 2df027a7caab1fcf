"""The console for tables."""

from __future__ import annotations

import os

from rich.console import Console

_WIDE = 1000
"""Width in a pipe or file: more than any row."""


def table_console() -> Console:
    """Standard output. Rows are wrapped at the width of the terminal; in a pipe, only if COLUMNS is set."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)

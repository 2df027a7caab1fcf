"""The doctor's results as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rpg_megatron.commands.doctor.probe import Check

_STYLES = {
    "ok": ("green", "ok"),
    "failed": ("bold red", "FAILED"),
    "warning": ("yellow", "warning"),
    "not applicable": ("dim", "n/a"),
}


def failures(checks: Sequence[Check]) -> int:
    """Number of failed checks."""
    return sum(check.verdict == "failed" for check in checks)


def print_checks(checks: Sequence[Check], console: Console, node: str | None = None) -> None:
    """Print all checks and a summary. node: this one of several, which prints failures and warnings only."""
    if node is not None:
        checks = [check for check in checks if check.verdict in ("failed", "warning")]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = [] if node is None else [escape(node)]
    for title in (*["node" for _ in names], "check", ""):
        table.add_column(title, no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        style, word = _STYLES[check.verdict]
        table.add_row(*names, escape(check.name), f"[{style}]{word}[/]", _text(check))
    if checks:
        console.print(table)
    bad = failures(checks)
    summary = f"[bold red]{bad} failed[/]" if bad else "[bold green]all checks passed[/]"
    console.print(": ".join([*names, summary]), highlight=False)


def to_json(checks: Sequence[Check], node: str) -> str:
    """One JSON object."""
    bad, nodes = failures(checks), [{"node": node, "checks": [asdict(check) for check in checks]}]
    return json.dumps({"ok": not bad, "failed": bad, "nodes": nodes}, indent=2)


def _text(check: Check) -> str:
    text = escape(check.found)
    if check.verdict == "not applicable":
        return f"[dim]not applicable: {text}[/]"
    return f"{text}\n[bold]fix:[/] {escape(check.fix)}" if check.fix else text

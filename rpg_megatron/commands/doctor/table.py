"""The doctor's results as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rpg_megatron.commands.doctor.gather import NodeReport
from rpg_megatron.commands.doctor.probe import Check

_STYLES = {
    "ok": ("green", "ok"),
    "failed": ("bold red", "FAILED"),
    "warning": ("yellow", "warning"),
    "not applicable": ("dim", "n/a"),
}
_SHOWN_NODES = 6


def failures(reports: Sequence[NodeReport]) -> int:
    """Number of failed checks on all nodes."""
    return sum(c.verdict == "failed" for r in reports for c in r.checks)


def print_reports(reports: Sequence[NodeReport], console: Console) -> None:
    """One node: all checks. Several nodes: one line per node, then the failures and warnings."""
    if len(reports) == 1:
        console.print(_checks_table(reports[0].checks))
    else:
        console.print(_nodes_table(reports))
        nodes_of: dict[Check, list[str]] = {}
        for report in reports:
            for check in report.checks:
                if check.verdict in ("failed", "warning"):
                    nodes_of.setdefault(check, []).append(report.node)
        if nodes_of:
            console.print(_faults_table(nodes_of))
    bad = failures(reports)
    summary = f"[bold red]{bad} failed[/]" if bad else "[bold green]all checks passed[/]"
    console.print(summary, highlight=False)


def to_json(reports: Sequence[NodeReport]) -> str:
    """One JSON object."""
    nodes = [{"node": r.node, "checks": [asdict(c) for c in r.checks]} for r in reports]
    return json.dumps({"ok": not failures(reports), "failed": failures(reports), "nodes": nodes}, indent=2)


def _checks_table(checks: Sequence[Check]) -> Table:
    table = _table()
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(escape(check.name), _verdict(check), _text(check))
    return table


def _nodes_table(reports: Sequence[NodeReport]) -> Table:
    table = _table()
    table.add_column("node", no_wrap=True)
    for name in ("ok", "warnings", "failed", "n/a"):
        table.add_column(name, justify="right")
    table.add_column("which", overflow="fold")
    for report in reports:
        count = {v: sum(c.verdict == v for c in report.checks) for v in _STYLES}
        bad = ", ".join(c.name for c in report.checks if c.verdict == "failed")
        style = "red" if count["failed"] else "green"
        table.add_row(
            f"[{style}]{escape(report.node)}[/]",
            str(count["ok"]),
            str(count["warning"] or ""),
            str(count["failed"] or ""),
            str(count["not applicable"] or ""),
            escape(bad),
        )
    return table


def _faults_table(nodes_of: dict[Check, list[str]]) -> Table:
    table = _table()
    for name in ("nodes", "check"):
        table.add_column(name)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check, nodes in nodes_of.items():
        more = f" (+{len(nodes) - _SHOWN_NODES})" if len(nodes) > _SHOWN_NODES else ""
        where = ", ".join(nodes[:_SHOWN_NODES]) + more
        table.add_row(escape(where), escape(check.name), _verdict(check), _text(check))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _verdict(check: Check) -> str:
    style, word = _STYLES[check.verdict]
    return f"[{style}]{word}[/]"


def _text(check: Check) -> str:
    text = escape(check.found)
    if check.verdict == "not applicable":
        return f"[dim]not applicable: {text}[/]"
    return f"{text}\n[bold]fix:[/] {escape(check.fix)}" if check.fix else text

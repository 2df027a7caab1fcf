"""The results of an evaluation as a table."""

from __future__ import annotations

from typing import Any

_SAMPLING = {
    "{} responses per problem": "samples",
    "temperature {}": "temperature",
    "top-p {}": "top_p",
    "at most {} tokens": "max_response_tokens",
}
"""Text above the table -> key of a set's summary, which is a row if sets differ."""


def show_summary(summary: dict[str, Any]) -> str:
    """A table with one column per set; percentages have 95% intervals."""
    sets: dict[str, dict[str, Any]] = summary["sets"]
    metrics = list(dict.fromkeys(key for part in sets.values() for key in part["metrics"]))
    rows = [["", *sets], ["problems", *(f"{part['problems']:,}" for part in sets.values())]]
    shared = []
    for title, key in _SAMPLING.items():
        # An earlier version wrote one value for all sets.
        numbers = [part.get(key, summary.get(key)) for part in sets.values()]
        values = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in numbers]
        if len(set(values)) == 1:
            shared.append(title.format(values[0]))
        else:
            rows.append([key.replace("_", " "), *values])
    rows += [[key, *(_interval(part["metrics"].get(key)) for part in sets.values())] for key in metrics]
    for title, key in (("length mean", "mean"), ("length p50", "p50"), ("length p99", "p99")):
        rows.append([title, *(f"{part['length'][key]:,.0f}" for part in sets.values())])
    rows.append(["truncated", *(_truncated(part["truncated"]) for part in sets.values())])
    rows.append(["no answer", *(f"{part['unanswered_frac']:.1%}" for part in sets.values())])
    if any(part["left_out"] for part in sets.values()):
        rows.append(["left out or cut", *(_left_out(part["left_out"]) for part in sets.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = f"{summary['model']}\n{', '.join([*shared, f'seed {summary["seed"]}'])}\n"
    return "\n".join([head, *lines, "", "in %; 95% intervals in brackets, from a bootstrap over problems"])


def _interval(metric: dict[str, float] | None) -> str:
    if metric is None:
        return "-"
    value, low, high = (100 * metric[key] for key in ("value", "low", "high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _truncated(row: dict[str, Any]) -> str:
    return f"{row['frac']:.1%}, in {row['problems']} problems" if row["problems"] else "none"


def _left_out(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in counts.items()) or "none"

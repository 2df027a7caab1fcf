"""The last result of each long test, and its commit: ``docs/evidence/long-tests.jsonl``.

``make test-long`` loads this (``-p tests.long_results``). A row is written when its test ends; a test that
has passed with the current commit is skipped, so the same command resumes an interrupted run. Changes in
``docs`` and Markdown files do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

FILE = Path("docs", "evidence", "long-tests.jsonl")
_CODE = ["--", ".", ":!docs", ":!*.md"]


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest."""
    config.pluginmanager.register(LongResults(config.rootpath), "long-results")


class LongResults:
    """The file's rows, by test."""

    def __init__(self, root: Path) -> None:
        self._file = root / FILE
        self._commit, self._changed = code_commit(root)
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcome: dict[str, str] = {}
        self._rows = read_rows(self._file, "test")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed with this commit, unless there are changes on top of it."""
        done = [] if self._changed else [item for item in items if self._has_passed(item.nodeid)]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item not in done]

    def _has_passed(self, test: str) -> bool:
        row = self._rows.get(test, {})
        return row.get("outcome") == "passed" and row.get("commit") == self._commit

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called three times for each test: set-up, call, teardown."""
        test = report.nodeid
        self._seconds[test] += report.duration
        if report.outcome != "passed" or test not in self._outcome:
            self._outcome[test] = report.outcome
        if report.when == "teardown":
            row = {
                "test": test,
                "outcome": self._outcome[test],
                "seconds": round(self._seconds[test]),
                "commit": self._commit + ("+changes" if self._changed else ""),
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            }
            put_row(self._file, "test", row=row)


def code_commit(root: Path) -> tuple[str, bool]:
    """The last commit that changed the code, and whether there are changes on top of it."""

    def git(*command: str) -> str:
        """What git prints, nothing outside of a repository."""
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%h", *_CODE) or "unknown"
    changes = git("status", "--porcelain", "--untracked-files=no", *_CODE)
    return commit, bool(changes) or commit == "unknown"


def read_rows(file: Path, *keys: str) -> dict[Any, dict[str, Any]]:
    """The rows of a file of results, by the value of these keys."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {_values(row, keys): row for row in map(json.loads, lines)}


def put_row(file: Path, *keys: str, row: dict[str, Any]) -> None:
    """Add a row to a file of results, in place of one with the same values of these keys."""
    rows = read_rows(file, *keys) | {_values(row, keys): row}  # another run may have written meanwhile
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)), encoding="utf-8")
    os.replace(part, file)


def _values(row: dict[str, Any], keys: Sequence[str]) -> Any:
    return row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys)

"""How each long test last ended, and with which commit: ``docs/evidence/long-tests.jsonl``.

``make test-long`` loads this (``-p tests.long_results``). A row is written when its test ends; a test that
has passed with the present commit is left out, so that the same command goes on where a run was broken off.
What lies in ``docs`` and Markdown files does not count as a change.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
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
        self._root, self._file = root, root / FILE
        self._commit = self._git("log", "-1", "--format=%h", *_CODE) or "unknown"
        changes = self._git("status", "--porcelain", "--untracked-files=no", *_CODE)
        self._changed = bool(changes) or self._commit == "unknown"
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcome: dict[str, str] = {}
        self._rows = self._read()

    def _git(self, *command: str) -> str:
        """What git prints, nothing outside of a repository."""
        done = subprocess.run(["git", *command], cwd=self._root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def _read(self) -> dict[str, dict[str, Any]]:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return {row["test"]: row for row in map(json.loads, lines)}

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
        """Three of them a test: set-up, call, teardown."""
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
            self._write(self._read() | {test: row})  # another run may have written meanwhile

    def _write(self, rows: dict[str, dict[str, Any]]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        lines = [json.dumps(rows[test]) + "\n" for test in sorted(rows)]
        part.write_text("".join(lines), encoding="utf-8")
        os.replace(part, self._file)

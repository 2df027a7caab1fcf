"""``make test-long`` resumes where it stopped, and records each test's result and commit.

Why: the long tests take hours; a run that starts over each time, or a result of older code that is taken for
one of this, would be useless. With a real repository and pytest in a separate process. Not covered: the long
tests themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken():
    yield
    raise RuntimeError
def test_that_ends_badly(broken): pass
@pytest.mark.skip
def test_left_out(): pass
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path, "test_it.py", "pytest.ini")
    return tmp_path


def git(folder: Path, *command: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    return subprocess.run(
        ["git", *author, *command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, *files: str) -> str:
    git(folder, "add", *files)
    git(folder, "commit", "-q", "-m", "more")
    return git(folder, "log", "-1", "--format=%h")


def run(folder: Path) -> tuple[set[str], dict[str, tuple[str, str]]]:
    """Names of the tests that ran, and the file's rows: outcome and commit by name."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.long_results", "-p", "no:cacheprovider"]
    out = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    ).stdout
    ran = {line.split("::")[1].split()[0] for line in out.splitlines() if line.startswith("test_it.py::")}
    lines = (folder / "docs/evidence/long-tests.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return ran, {row["test"].split("::")[1]: (row["outcome"], row["commit"]) for row in rows}


def test_what_has_passed_runs_again_only_with_other_code(repository: Path) -> None:
    first = git(repository, "log", "-1", "--format=%h")
    everything = {"test_good", "test_bad", "test_that_ends_badly", "test_left_out"}
    ran, rows = run(repository)
    assert ran == everything
    assert rows == {
        "test_good": ("passed", first),
        "test_bad": ("failed", first),
        "test_that_ends_badly": ("failed", first),
        "test_left_out": ("skipped", first),
    }
    commit(repository, "docs")  # its own results are no change of the code
    assert run(repository)[0] == everything - {"test_good"}

    (repository / "test_it.py").write_text(TESTS + "# other\n")
    ran, rows = run(repository)
    assert ran == everything
    assert rows["test_good"] == ("passed", f"{first}+changes")
    assert run(repository)[0] == everything  # uncommitted changes may differ each time
    second = commit(repository, "test_it.py")
    ran, rows = run(repository)
    assert (ran, rows["test_good"]) == (everything, ("passed", second))

"""``tools/gpu_check.sh``: its arguments, what it says without a GPU, and its table of what came of the parts.

Why: minutes on a borrowed GPU are few; the script that spends them must not stumble over itself.
GPU and Python are stand-ins. Not covered: the parts themselves, which need a GPU.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.sh"
PARTS = 16
PYTHON = """#!/bin/sh
case "$*" in
    *benchmarks.gpu_update*8b*) echo "no such kernel"; exit 3 ;;
    *benchmarks.gpu_logprobs*) sleep 60 ;;
    *'import pytest'*) exit 1 ;;
esac
echo "$PYTHONPATH"
"""


def check(folder: Path, *arguments: str, gpu: bool = False) -> tuple[int, str, str]:
    """Run it; with a stand-in for the GPU's tool if ``gpu``."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n"), ("python", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    archives = folder / "archives"
    archives.mkdir(exist_ok=True)
    (archives / "te.tar.xz").touch()
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "RPG_GPU_ARCHIVES": str(archives),
        "RPG_GPU_PART_SECONDS": "2",
    }
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def results(table: str) -> dict[str, str]:
    rows = table[table.index("part  ") :].splitlines()[1:]
    return {row.split()[0]: row[15:37].strip() for row in rows}


def test_arguments(tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    code, out, _ = check(tmp_path, "--help")
    assert code == 0
    assert out.count("\n") == 2 + PARTS
    for arguments, told in (
        ([], "usage: "),
        (["--fast", site], "unknown option --fast"),
        ([site, "smoke_te", "nothing"], "there is no part nothing; known: site smoke_te"),
        ([str(SCRIPT)], "is in the way and no folder"),
    ):
        code, _, err = check(tmp_path, *arguments)
        assert (code, told in err) == (2, True), err


def test_without_a_gpu_every_part_says_so_and_nothing_is_written(tmp_path: Path) -> None:
    code, out, _ = check(tmp_path, str(tmp_path / "site"))
    assert code == 77
    assert results(out) == dict.fromkeys(results(out), "skipped: no GPU")
    assert len(results(out)) == PARTS
    assert not (tmp_path / "site").exists()


def test_parts_that_pass_fail_and_hang(tmp_path: Path) -> None:
    site = tmp_path / "site"
    code, out, _ = check(tmp_path, str(site), "numbers", "tests", gpu=True)
    assert code == 1
    found = results(out)
    assert (found["numbers"], found["tests"]) == ("passed", "skipped: no pytest")
    assert list(found.values()).count("not run") == PARTS - 2
    code, out, _ = check(tmp_path, str(site), gpu=True)
    assert code == 1
    assert "== numbers" not in out  # it has a result from before
    found = results(out)
    assert found.pop("update_8b") == "FAILED (3)"
    assert found.pop("logprobs") == "TIMED OUT"
    assert found.pop("tests") == "skipped: no pytest"
    assert set(found.values()) == {"passed"}
    assert (site / "check" / "table.txt").read_text() in out
    assert "no such kernel" in (site / "check" / "update_8b.log").read_text()
    where = (site / "check" / "numbers.log").read_text().strip().split(":")
    assert where == [str(site), str(SCRIPT.parents[1])]

"""``tools/gpu_check.sh``: its arguments, what it says without a GPU, and its table of what came of the parts.

Why: minutes on a borrowed GPU are few; the script that spends them must not stumble over itself.
GPU and packages are stand-ins, mostly Python too. Not covered: the parts themselves, which need a GPU.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.sh"
PARTS = 17
NEED_VLLM = {
    "smoke_vllm",
    "mismatch_bf16",
    "mismatch_fp8",
    "run_06b_2k",
    "run_06b_8k",
    "run_4b_2k",
    "run_4b_8k",
    "quickstart",
    "quickstart_bf16",
    "colocated",
}
PYTHON = """#!/bin/sh
case "$*" in
    *benchmarks.gpu_update*8b*) echo "no such kernel"; exit 3 ;;
    *benchmarks.gpu_logprobs*) sleep 60 ;;
esac
echo "$PYTHONPATH"
"""


def check(
    folder: Path, *arguments: str, gpu: bool = False, python: str | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run it; with a stand-in for the GPU's tool if ``gpu``, and for Python unless ``python`` names one."""
    tools, archives = folder / "tools", folder / "archives"
    for made in (tools, archives):
        made.mkdir(exist_ok=True)
    for name, text in (("nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n"), ("python", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": python or str(tools / "python"),
        "RPG_GPU_ARCHIVES": str(archives),
        "RPG_GPU_PART_SECONDS": "2",
    }
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def site_with(folder: Path, *packages: str) -> Path:
    """A site folder that seems to hold packages, and smoke tests that came with them."""
    for package in packages:
        (folder / "site" / package).mkdir(parents=True, exist_ok=True)
    (folder / "site" / "check").mkdir(exist_ok=True)
    for smoke in ("smoke_te", "smoke_vllm"):
        (folder / "site" / "check" / f"{smoke}.py").touch()
    return folder / "site"


def results(table: str) -> dict[str, str]:
    rows = table[table.index("part  ") :].splitlines()[1:]
    return {row.split()[0]: row[16:38].strip() for row in rows}


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
    site = site_with(tmp_path, "transformer_engine", "vllm")
    code, out, _ = check(tmp_path, str(site), "numbers", "tests", gpu=True)
    assert code == 1
    found = results(out)
    assert (found["numbers"], found["tests"]) == ("passed", "passed")
    assert list(found.values()).count("not run") == PARTS - 2
    (out_folder := tmp_path / "out").mkdir()
    code, out, _ = check(tmp_path, str(site), gpu=True, RPG_GPU_OUT=str(out_folder))
    assert code == 1
    assert "== numbers" not in out  # it has a result from before
    found = results(out)
    assert found.pop("update_8b") == "FAILED (3)"
    assert found.pop("logprobs") == "TIMED OUT"
    assert set(found.values()) == {"passed"}
    assert (site / "check" / "table.txt").read_text() in out
    assert "no such kernel" in (site / "check" / "update_8b.log").read_text()
    where = (site / "check" / "numbers.log").read_text().strip().split(":")
    assert where == [str(site), str(SCRIPT.parents[1])]
    assert sorted(f.name for f in out_folder.iterdir()) == ["gpu_check.tar.gz", "gpu_check.txt"]
    with tarfile.open(out_folder / "gpu_check.tar.gz") as kept:
        assert {"./numbers.log", "./update_8b.log", "./logprobs.log"} <= set(kept.getnames())


def test_parts_wait_for_their_packages_and_for_time(tmp_path: Path) -> None:
    site = site_with(tmp_path, "transformer_engine")
    code, out, _ = check(tmp_path, str(site), gpu=True, RPG_GPU_SECONDS="100")
    assert code == 1
    found = results(out)
    assert {name for name in NEED_VLLM if found[name] != "not run"} == set()
    assert "== smoke_vllm waits for the archives: vllm" in out
    assert (found["smoke_te"], found["numbers"], found["tests"]) == ("passed", "passed", "not run")
    assert "== tests waits for another call: " in out
    site_with(tmp_path, "vllm")
    code, out, _ = check(tmp_path, str(site), gpu=True)
    assert "== smoke_te" not in out
    found = results(out)
    assert {found[name] for name in NEED_VLLM | {"tests"}} == {"passed"}


def test_archives_are_unpacked_once_and_the_plug_in_is_made_known(tmp_path: Path) -> None:
    archives = tmp_path / "archives"
    archives.mkdir()
    with tarfile.open(archives / "te.tar.xz", "w:xz") as archive:
        archive.addfile(tarfile.TarInfo("transformer_engine/__init__.py"), io.BytesIO())
    (archives / "smoke_te.py").write_text("import transformer_engine as t; print(t.__file__)")
    site = tmp_path / "site"
    for unpacked in (True, False):
        code, out, err = check(tmp_path, str(site), "smoke_te", gpu=True, python=sys.executable)
        assert (code, results(out)["smoke_te"]) == (1, "passed"), out + err
        assert ("unpacked te.tar.xz" in out) == unpacked
    assert str(site / "transformer_engine" / "__init__.py") in out
    (info,) = site.glob("rpg_megatron-*.dist-info/entry_points.txt")
    assert "rpg_megatron = rpg_megatron.bridge.vllm_plugin:register" in info.read_text()
    (tmp_path / "elsewhere" / "benchmarks").mkdir(parents=True)
    (tmp_path / "elsewhere" / "benchmarks" / "__init__.py").touch()  # some package's own
    command = "import importlib.util as u; print(u.find_spec('benchmarks.gpu_run').origin)"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": f"{site}:{SCRIPT.parents[1]}:{tmp_path / 'elsewhere'}"},
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
        timeout=120,
    )
    assert found.stdout.strip() == str(SCRIPT.parents[1] / "benchmarks" / "gpu_run.py"), found.stderr
    (archives / "deps.tar.xz").write_bytes(b"half an archive")
    code, out, err = check(tmp_path, str(site), "smoke_te", gpu=True, python=sys.executable)
    assert (code, "are damaged" in err) == (2, True), out

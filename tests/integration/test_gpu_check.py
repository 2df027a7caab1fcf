"""``tools/gpu_check.sh``: its arguments, its output without a GPU, and its table of results.

Why: minutes on a borrowed GPU are few; the script must not waste them by faults of its own.
A call may run on another machine than the last one. GPU and packages are stand-ins, mostly Python too. Not
covered: the parts themselves, which need a GPU.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.sh"
PARTS = 19
NEED_ENGINE = {
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
WORTH = [
    "site",
    "smoke_te",
    "cuda_ipc",
    "smoke_vllm",
    "run_06b_2k",
    "mismatch_bf16",
    "mismatch_fp8",
    "numbers",
]
MARKS = {"te": "transformer_engine", "app": "math_verify", "deps": "xgrammar", "vllm": "vllm"}
"""Archive -> a package that only it holds."""
CARDS = """#!/bin/sh
[ "$1" != -L ] || for i in $(seq ${CARDS:-1}); do echo "GPU $i: a card (UUID: GPU-$i)"; done
"""
PYTHON = """#!/bin/sh
case "$*" in
    *importlib.util*) exit ;;
    *benchmarks.gpu?update*8b*)
        [ -z "${SOUND:-}" ] || exit 0
        echo "RuntimeError: no such kernel"; echo; exit 3
        ;;
    *benchmarks.gpu?logprobs*) echo "step 1"; sleep ${HANG:-0} ;;
esac
[ "$1" = - ] || [ ! -x "$STAND_IN" ] || exec "$STAND_IN" "$@"
echo "$PYTHONPATH"
"""


def check(
    folder: Path, *arguments: str, gpu: bool = False, python: str | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run it; with a stand-in for the GPU's tool if ``gpu``, and for Python unless ``python`` names one."""
    tools, archives = folder / "tools", folder / "archives"
    for created in (tools, archives):
        created.mkdir(exist_ok=True)
    for name, text in (("nvidia-smi", CARDS if gpu else "#!/bin/sh\nexit 9\n"), ("python", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": python or str(tools / "python"),
        "RPG_GPU_ARCHIVES": str(archives),
        "STAND_IN": str(folder / "stand_in"),
    }
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def hang(folder: Path, *arguments: str, **variables: str) -> None:
    """A call in which one part, logprobs, exceeds its time."""
    check(folder, *arguments, "logprobs", gpu=True, HANG="60", RPG_GPU_PART_SECONDS="2", **variables)


def site_with(folder: Path, *packages: str) -> Path:
    """A site folder that seems to hold archives' packages, and smoke tests that came with them."""
    for package in packages:
        (folder / "site" / MARKS[package]).mkdir(parents=True, exist_ok=True)
    (folder / "site" / "check").mkdir(exist_ok=True)
    for smoke in ("smoke_te", "smoke_vllm"):
        (folder / "site" / "check" / f"{smoke}.py").touch()
    return folder / "site"


def results(table: str) -> dict[str, str]:
    rows = table[table.index("part  ") :].splitlines()[1:]
    return {row.split()[0]: row[16:38].strip() for row in rows if "  why: " not in row}


def reason(table: str, part: str) -> str:
    """The line below a part's row."""
    below = table[table.index("part  ") :].partition(f"\n{part} ")[2].splitlines()[1]
    return below.partition("why: ")[2]


def stand_in(folder: Path, script: str) -> None:
    """Set what the stand-in for Python runs, besides its fixed faults."""
    (folder / "stand_in").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "stand_in").chmod(0o755)


def test_arguments(tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    code, out, _ = check(tmp_path, "--help")
    assert code == 0
    assert out.count("\n") == 2 + PARTS
    for arguments, message in (
        ([], "usage: "),
        (["--fast", site], "unknown option --fast"),
        ([site, "smoke_te", "nothing"], "there is no part nothing; known: site smoke_te"),
        ([str(SCRIPT)], "is in the way and no folder"),
    ):
        code, _, err = check(tmp_path, *arguments)
        assert (code, message in err) == (2, True), err


def test_without_a_gpu_every_part_says_so_and_nothing_is_written(tmp_path: Path) -> None:
    code, out, _ = check(tmp_path, str(tmp_path / "site"))
    assert code == 77
    assert results(out) == dict.fromkeys(results(out), "skipped: no GPU")
    assert len(results(out)) == PARTS
    assert not (tmp_path / "site").exists()


def test_parts_that_pass_fail_and_hang(tmp_path: Path) -> None:
    site = site_with(tmp_path, *MARKS)
    code, out, _ = check(tmp_path, str(site), "numbers", "tests", gpu=True)
    assert code == 1
    parts = results(out)
    assert (parts["numbers"], parts["tests"]) == ("passed", "passed")
    assert list(parts.values()).count("not run") == PARTS - 3
    hang(tmp_path, str(site))
    (out_folder := tmp_path / "out").mkdir()
    code, out, _ = check(tmp_path, str(site), gpu=True, RPG_GPU_OUT=str(out_folder))
    assert code == 1
    assert "== numbers" not in out  # it has a result from before
    parts = results(out)
    assert parts.pop("update_8b") == "FAILED (3)"
    assert reason(out, "update_8b") == "RuntimeError: no such kernel"
    assert parts.pop("logprobs") == "TIMED OUT"
    assert reason(out, "logprobs") == "no end after 2 s; the log ends with: step 1"
    assert parts.pop("two_gpus") == "skipped: needs 2 GPUs"
    assert set(parts.values()) == {"passed"}
    assert (site / "check" / "table.txt").read_text() in out
    where = (site / "check" / "numbers.log").read_text().strip().split(":")
    assert where == [str(site), str(SCRIPT.parents[1])]
    expected = ["gpu_check.tar.gz", "gpu_check.txt", "gpu_check_failed.txt"]
    assert sorted(f.name for f in out_folder.iterdir()) == expected
    with tarfile.open(out_folder / "gpu_check.tar.gz") as archive:
        assert {"./update_8b.log", "./logprobs.log", "./smoke_te.log"} <= set(archive.getnames())
    failed = "==== update_8b\nRuntimeError: no such kernel\n\n==== logprobs\nstep 1\n"
    assert (out_folder / "gpu_check_failed.txt").read_text() == failed


def test_parts_run_in_the_order_of_their_worth(tmp_path: Path) -> None:
    code, out, _ = check(tmp_path, str(site_with(tmp_path, *MARKS)), gpu=True, CARDS="2")
    assert code == 1
    order = re.findall(r"^== (\w+) \(log", out, re.MULTILINE)
    assert order == list(results(out))
    assert order[: len(WORTH)] == WORTH
    assert results(out)["two_gpus"] == "passed"


def test_parts_wait_for_their_packages_and_for_time(tmp_path: Path) -> None:
    site = site_with(tmp_path, "te", "app", "deps")
    code, out, _ = check(tmp_path, str(site), gpu=True, RPG_GPU_SECONDS="109")  # a second too few for tests
    assert code == 1
    parts = results(out)
    waiting = NEED_ENGINE | {"smoke_vllm"}
    assert {name for name in waiting if parts[name] != "not run"} == set()
    assert f"not in {site}: vllm.tar.xz; archives: none in {tmp_path}" in out
    assert "== run_06b_2k waits for: vllm.tar.xz" in out
    assert re.search("^smoke_vllm .*needs vllm.tar.xz", out, re.MULTILINE)
    assert (parts["smoke_te"], parts["cuda_ipc"], parts["tests"]) == ("passed", "passed", "not run")
    assert "== tests waits for another call: " in out
    # Packages without what they need: nothing is started that could only fail.
    (other := tmp_path / "other").mkdir()
    without = site_with(other, "te", "app", "vllm")
    code, out, _ = check(other, str(without), gpu=True)
    assert {results(out)[name] for name in (*waiting, "cuda_ipc", "tests")} == {"not run"}
    assert "== smoke_vllm waits for: deps.tar.xz\n" in out
    assert "== cuda_ipc waits for: deps.tar.xz\n" in out
    site_with(tmp_path, "vllm")
    (site / "check" / "smoke_vllm.py").unlink()
    _, out, _ = check(tmp_path, str(site), gpu=True)
    assert {name for name in waiting if results(out)[name] != "passed"} == {"smoke_vllm"}
    assert "== smoke_vllm waits for: smoke_vllm.py" in out
    site_with(tmp_path)
    code, out, _ = check(tmp_path, str(site), gpu=True)
    parts = results(out)
    assert {parts[name] for name in waiting} == {"passed"}


def test_a_call_on_a_new_machine_resumes_the_lost_one(tmp_path: Path) -> None:
    (first := tmp_path / "first").mkdir()
    (out_folder := tmp_path / "out").mkdir()
    site = site_with(first, *MARKS)
    hang(first, str(site))
    check(first, str(site), "smoke_te", "update_8b", gpu=True, RPG_GPU_OUT=str(out_folder))
    earlier = out_folder / "gpu_check.txt"
    before = earlier.read_text()
    # Folder of packages and results are gone, and one archive's packages have come. The table is given, or
    # lies with the archives.
    for way in ("named", "carried"):
        (new := tmp_path / way).mkdir()
        (new_out := new / "out").mkdir()
        (new / "archives").mkdir()
        if way == "carried":
            (new / "archives" / "gpu_check.txt").write_text(before)
        variables = {"RPG_GPU_EARLIER": str(earlier)} if way == "named" else {}
        site = site_with(new, "te")
        python = sys.executable if way == "carried" else None
        parts = ["smoke_te"] if way == "carried" else []
        code, out, err = check(
            new, str(site), *parts, gpu=True, python=python, RPG_GPU_OUT=str(new_out), **variables
        )
        assert code == 1, err
        by_part = results(out)
        assert by_part["smoke_te"] == "passed"
        assert ("== smoke_te (" in out) == (way == "carried")
        assert (by_part["update_8b"], by_part["logprobs"]) == ("FAILED (3)", "TIMED OUT")
        assert reason(out, "update_8b") == "RuntimeError: no such kernel"
        assert reason(out, "logprobs") == reason(before, "logprobs")
        assert re.search("^update_8b .*layers \\(earlier\\)$", out, re.MULTILINE)
        assert (new_out / "gpu_check.txt").read_text() in out
    assert "== cuda_ipc waits for: app.tar.xz" in check(new, str(site), gpu=True)[1]
    # This machine's own results take precedence.
    (site / "check" / "logprobs").write_text("passed|3|\n")
    assert results(check(new, str(site), gpu=True, RPG_GPU_EARLIER=str(earlier))[1])["logprobs"] == "passed"
    code, _, err = check(new, str(site), gpu=True, RPG_GPU_EARLIER=str(tmp_path / "none"))
    assert (code, "there is no file" in err) == (2, True), err
    code, _, err = check(new, str(site), gpu=True, RPG_GPU_EARLIER=str(SCRIPT))
    assert (code, "is no table of this script" in err) == (2, True), err


def test_all_parts_pass(tmp_path: Path) -> None:
    stand_in(tmp_path, "exit 0")
    code, out, _ = check(tmp_path, str(site_with(tmp_path, *MARKS)), gpu=True, SOUND="1")
    assert code == 0
    assert set(results(out).values()) == {"passed", "skipped: needs 2 GPUs"}


def test_without_cuda_ipc_runs_take_another_transport(tmp_path: Path) -> None:
    stand_in(tmp_path, 'case "$*" in *test_cuda_ipc*) exit 1 ;; esac; echo "$@"')
    site = site_with(tmp_path, *MARKS)
    _, out, _ = check(tmp_path, str(site), "run_06b_2k", "cuda_ipc", "quickstart", gpu=True)
    assert "--transport cuda_ipc" in (site / "check" / "run_06b_2k.log").read_text()
    assert "bridge.transport=process_group" in (site / "check" / "quickstart.log").read_text()
    assert reason(out, "quickstart") == "weights over process_group, for cuda_ipc failed"


def test_archives_are_unpacked_once_and_register_the_plug_in(tmp_path: Path) -> None:
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
    assert "rpg_megatron = rpg_megatron.bridge.vllm.plugin:register" in info.read_text()
    (tmp_path / "elsewhere" / "benchmarks").mkdir(parents=True)
    (tmp_path / "elsewhere" / "benchmarks" / "__init__.py").touch()  # some package's own
    command = "import importlib.util as u; print(u.find_spec('benchmarks.gpu').origin)"
    probe = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": f"{site}:{SCRIPT.parents[1]}:{tmp_path / 'elsewhere'}"},
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
        timeout=120,
    )
    assert probe.stdout.strip() == str(SCRIPT.parents[1] / "benchmarks" / "gpu.py"), probe.stderr
    version = importlib.metadata.version("torch").partition("+")[0]
    fits = site / "vllm-1.0.dist-info"
    fits.mkdir()
    for needed, refused in ((version, False), ("2.0.1", True)):
        (fits / "METADATA").write_text(f"Requires-Dist: torchaudio==1\nRequires-Dist: torch=={needed}\n")
        code, _, err = check(tmp_path, str(site), "smoke_te", gpu=True, python=sys.executable)
        assert (code, f"vllm-1.0 in {site} needs torch 2.0.1, and Python has {version};" in err) == (
            (2, True) if refused else (1, False)
        ), err
    shutil.rmtree(fits)
    (archives / "deps.tar.xz").write_bytes(b"half an archive")
    code, out, err = check(tmp_path, str(site), "smoke_te", gpu=True, python=sys.executable)
    assert (code, "are damaged" in err) == (2, True), out

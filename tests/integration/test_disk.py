"""A run whose disk fills up continues, ends with one message when it must, and resumes when there is space.

Why: the disk of a long run does fill up; nothing learnt before may be lost.
Proved, with a real engine by the command line, on a small disk: with too little room for a checkpoint the run
warns, counts it and continues; with no room for a row of metrics it ends with exit code 2, without traceback,
process or shared memory left; the newest checkpoint is whole, and the same command finishes the run with
every step in the metrics once. Not covered: several nodes; how a save ends at each point
(test_async_checkpoints).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rpg_megatron.checkpoints.run_folder import find_problems, list_steps
from tests.support.same_runs import read_rows

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SETTINGS = [
    "parallel.tensor=1",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    "training.steps=40",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "evaluation=null",
    "checkpoint={every: 1, keep: 1}",
]
TIMEOUT = 580.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 96 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, room: int) -> None:
    """Fill the disk, but leave this many bytes."""
    with (disk / "ballast").open("ab") as file:
        while (free := shutil.disk_usage(disk).free - room) > 0:
            file.write(bytes(min(free, 1 << 20)))
            file.flush()


def words_of_processes() -> list[list[str]]:
    """The command lines of this test's processes. ``process_iter`` tolerates that processes end meanwhile."""
    lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    # Not pytest itself, whose arguments may name the test.
    return [words for words in lines if "test_a_run_trains_on" in " ".join(words) and "pytest" not in words]


def shared_memory() -> set[Path]:
    """The folders that this test's run shares between its processes; other runs may be there too."""
    return {Path(w) for words in words_of_processes() for w in words if w.startswith("/dev/shm/rpg-")}


@pytest.mark.long  # two real runs each
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("exports", "code"), [("false", 74), ("true", 2)])
def test_a_disk_that_is_full_at_the_end_is_no_success(
    disk: Path, tmp_path: Path, exports: str, code: int
) -> None:
    """No room for the last checkpoint, or for the export: reported, and made when the command runs again."""
    run, log = disk / "full-001", tmp_path / "log"
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(QUICKSTART), *SETTINGS]
    command += ["training.steps=4", "checkpoint={every: 2, keep: 1}", f"export.enabled={exports}"]
    command += [f"runs={disk}", "name=full"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while not list_steps(run):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            fill(disk, 2_000_000)  # less than an export
            assert process.wait(TIMEOUT) == code, log.read_text()
        finally:
            process.kill()
            process.wait()
    output = log.read_text()
    assert "Traceback" not in output
    if code == 74:
        assert "last checkpoint  NOT WRITTEN: " in output
        assert sum(row.get("checkpoint/failed", 0) for row in read_rows(run)) == 1
    else:
        assert "cannot be written ([Errno 28] No space left on device" in output
        assert not list((run / "hf").glob(".*"))
    (disk / "ballast").unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from step 2;" in done.stdout
    assert [row["step"] for row in read_rows(run)] == list(range(5))
    assert list(list_steps(run)) == [4]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_trains_on_without_room_and_ends_when_it_must(disk: Path, tmp_path: Path) -> None:
    run, log = disk / "full-001", tmp_path / "log"
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(QUICKSTART), *SETTINGS]
    command += [f"runs={disk}", "name=full"]

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def wait_for(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    process = start()
    try:
        wait_for(lambda: len(read_rows(run)) >= 3 and bool(list_steps(run)))
        shared = shared_memory()
        assert any(place.exists() for place in shared)

        def failed_to_save() -> bool:
            fill(disk, 1_000_000)  # again and again: a checkpoint that is removed leaves room for the next
            return any(row.get("checkpoint/failed") for row in read_rows(run))

        wait_for(failed_to_save)
        failed = next(row["step"] for row in read_rows(run) if row.get("checkpoint/failed"))
        wait_for(lambda: read_rows(run)[-1]["step"] > failed)  # and it continues
        assert "no checkpoint" in log.read_text()
        fill(disk, 0)
        assert process.wait(TIMEOUT) == 2, log.read_text()
    finally:
        process.kill()
        process.wait()
    output = log.read_text()
    assert "Traceback" not in output, output
    assert "cannot be written ([Errno 28] No space left on device" in output
    assert words_of_processes() == []
    assert not any(place.exists() for place in shared)
    steps = list_steps(run)
    assert steps
    assert not any(find_problems(place) for place in steps.values())
    newest = max(steps)
    assert newest <= failed

    (disk / "ballast").unlink()
    last = read_rows(run)[-1]["step"]
    command.append(f"training.steps={last + 1}")
    process = start()
    try:
        wait_for(lambda: bool(shared_memory()))
        shared = shared_memory()
        assert process.wait(TIMEOUT) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert f"from step {newest};" in log.read_text()
    assert [row["step"] for row in read_rows(run)] == list(range(last + 2))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest.json", f"step_{last + 1:06d}"]
    assert words_of_processes() == []
    assert not any(place.exists() for place in shared)

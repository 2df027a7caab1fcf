"""Many of Harbor's episodes at once, one image a task, and kill -9 of each process that one of them has.

Why: at scale something is always killed, and what it leaves (processes, mounts, locks) would stop the next
run on the node. The processes are those of a run, from the sampler worker down; the model is a script.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.setup import Watch, process_tree
from tests.support.harbor_tasks import write_task
from tests.support.images import make_root, make_squashfs
from tests.support.ranks import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("mksquashfs") is None,
    reason="bubblewrap or squashfs-tools is missing",
)


def start(config: Path, folder: Path, count: int, **keys: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.harbor_runs", config, folder, count, json.dumps(keys)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen(
        [*map(str, command)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def make_tasks(folder: Path, count: int, images: int) -> list[tuple[str, str]]:
    """Tasks in turn on images that differ in a file."""
    root = make_root(folder / "root")
    made = []
    for n in range(images):
        (root / "app/number").write_text(str(n))
        made.append(str(make_squashfs(root, folder / f"{n}.squashfs")))
    test = '[ "$(cat /app/out)" = "$(cat /app/number)" ]'
    places = [write_task(folder / "tasks", f"t{n}", condition=test, solve="true") for n in range(count)]
    return [(str(place), made[n % images]) for n, place in enumerate(places)]


def wait_until(condition: Callable[[], object], owner: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert owner is None or owner.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run; a zombie whose parent is the tests' container is none."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def check_nothing_is_left(folder: Path, mounts: str) -> None:
    """No mount, no folder of a sandbox, no part of an image; each lock can be had."""
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not [p for p in folder.iterdir() if p.name.startswith(("sandbox-", "tmp"))]
    cache = folder / "cache"
    assert {p.suffix for p in cache.iterdir()} <= {"", ".lock"}
    for file in cache.glob("*.lock"):
        with open(file, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


KILLED = ["driver", "episodes' fork server", "episode worker", "sandboxes' fork server"]
KILLED += ["sandbox's parent", "guardian", "sandbox", "bwrap", "bwrap in the namespace"]


@pytest.mark.parametrize("killed", KILLED)
def test_a_killed_process_leaves_nothing(config_file: Path, tmp_path: Path, killed: str) -> None:
    """Two episodes at once; a process above the command of one is killed. Then a run with the same cache."""
    mark, mounts = f"rpg-held-{os.getpid()}", Path("/proc/self/mounts").read_text()
    keys: dict[str, Any] = {"tasks": make_tasks(tmp_path, 2, 1), "cache": str(tmp_path / "cache")}
    keys |= {"commands": [f"exec -a {mark} sleep 1000"], "without": str(tmp_path / "without"), "at_once": 2}
    run = start(config_file, tmp_path, 2, **keys)

    def held() -> list[psutil.Process]:
        found = []
        for process in process_tree(run.pid):
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.cmdline()[:1] == [mark] else []
        return found

    wait_until(lambda: len(held()) == 2, run)
    before = process_tree(run.pid)
    own = next(p for p in before if p.pid == run.pid)
    chain = [p for p in reversed(held()[0].parents()) if p in before]
    assert chain[0] == own
    assert len(chain) == len(KILLED), [(p.pid, p.cmdline()) for p in chain]
    (tmp_path / "without").touch()
    chain[KILLED.index(killed)].send_signal(signal.SIGKILL)
    while run.poll() is None:
        for other in held():  # its episode goes on
            with suppress(psutil.NoSuchProcess):
                other.kill()
        time.sleep(0.05)
    said, _ = run.communicate()
    if killed != "driver":
        assert json.loads(said)["failures"] == 0, said
    if killed == "sandbox":
        assert sum(json.loads(said)["parts"]["env/no_reward"]) == 1
    wait_until(lambda: not alive(before))
    check_nothing_is_left(tmp_path, mounts)
    again = start(config_file, tmp_path, 2, **keys)
    said, _ = again.communicate(timeout=300)
    assert json.loads(said)["failures"] == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_64_at_once(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tasks with eight images, none unpacked before, in two processes; prints what an episode costs."""
    mounts = Path("/proc/self/mounts").read_text()
    commands = [
        "ls -l; cat number",
        "for n in 1 2 3; do echo $n; done > a; sort -r a",
        "cp number out",
        "false",
    ]
    keys = {"tasks": make_tasks(tmp_path, 64, 8), "commands": commands, "cache": str(tmp_path / "cache")}
    run = start(config_file, tmp_path, 64, workers=2, deadline=900, at_once=1, **keys)
    most = {"processes": 0}

    def memory() -> int:
        tree = process_tree(run.pid)
        most["processes"] = max(most["processes"], len(tree))
        total = 0
        for process in tree:
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    with Watch(memory, every=0.5) as watch:
        said = json.loads(run.communicate(timeout=900)[0])
    assert said["rewards"] == [1.0] * 64
    assert said["failures"] == 0
    assert said["parts"]["env/shell_errors"] == [1] * 64
    check_nothing_is_left(tmp_path, mounts)
    parts = {name: sum(values) / 64 for name, values in said["parts"].items() if name.endswith("_seconds")}
    peak = max(value for _, value in watch.samples)
    with capsys.disabled():
        print(f"\n64 episodes in {said['seconds']:.1f} s, CPU {said['cpu'] / 64:.2f} s each, means: {parts}")
        print(f"peak PSS {peak / 2**20:.0f} MiB in all, {most['processes']} processes at most")

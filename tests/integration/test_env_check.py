"""``rpg-megatron env check``: which tasks of thirty are bad, and why.

Why: a task whose tests pass without a solution, or never pass, teaches nothing or the wrong thing; the
command must find each kind and accuse no good one. Images are .sif files of this machine's programs, made by
squashfs-tools. Not covered: images of others.
"""

from __future__ import annotations

import json
import re
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harbor_tasks import write_task, write_tasks
from tests.support.images import PYTHON, make_root, make_sif
from tests.support.ranks import ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing"),
    pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="squashfs-tools is missing"),
    pytest.mark.skipif(not Path(f"/usr/lib/{PYTHON.name}").is_dir(), reason="the system has no Python"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    kinds = {"shell": False, "python": True}
    return {
        name: make_sif(make_root(folder / name, python=python), folder / f"{name}.sif")
        for name, python in kinds.items()
    }


class _Hello(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"hello\n")


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def check(folder: Path, *options: str) -> tuple[int, dict[str, str], str]:
    """Exit code, what is wrong with each task, and all of the output."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "env", "check", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    said = re.findall(r"^\[\d+/\d+\] (\S+): (.*) \([\d.]+ s\)$", done.stdout, re.MULTILINE)
    return done.returncode, dict(said), done.stdout + done.stderr


@pytest.mark.parametrize("network", [False, True])
def test_thirty_tasks(tmp_path: Path, images: dict[str, Path], port: int, network: bool) -> None:
    (tmp_path / "tasks").mkdir()
    wrong = write_tasks(tmp_path / "tasks", images, network=port)
    assert len(wrong) == 30
    options = [f"--cache={tmp_path / 'cache'}", *(["--network"] if network else [])]
    code, said, output = check(tmp_path / "tasks", *options)
    assert {name: what.split(":")[0] for name, what in said.items()} == {
        n: w or "good" for n, w in wrong.items()
    }
    assert code == 1
    bad = re.findall(r"^bad: (\S+): ", output, re.MULTILINE)
    assert bad == sorted(name for name, what in wrong.items() if what)
    assert "not used: environment.cpus, in 30 tasks\n" in output
    assert output.endswith("22 of 30 tasks give 1 with their solution and 0 without\n")
    if network:
        assert said["bad-network-0"] == "needs a network: with one, its solution passes"


def test_tests_have_no_network_although_their_solution_has(
    tmp_path: Path, images: dict[str, Path], port: int
) -> None:
    test = f"#!/bin/bash\nexec 3<>/dev/tcp/127.0.0.1/{port} && echo 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path, "a", test=test, solve="true")
    (tmp_path / "images.json").write_text(json.dumps({"a": str(images["shell"])}))
    code, said, _ = check(
        tmp_path / "a", f"--images={tmp_path}/images.json", f"--cache={tmp_path}/cache", "--network"
    )
    assert (code, said["a"].split(":")[0]) == (1, "needs a network")


def test_a_good_folder_has_exit_code_0_and_a_limit_may_be_given(
    tmp_path: Path, images: dict[str, Path]
) -> None:
    write_task(tmp_path, "a", condition="[ -f /app/x ]", solve="touch /app/x")
    write_task(tmp_path, "b", condition="[ -f /app/x ]", solve="sleep 3; touch /app/x")
    (tmp_path / "images.json").write_text(json.dumps({"shell": str(images["shell"])}))
    assert check(tmp_path, f"--cache={tmp_path}/cache")[:2] == (0, {"a": "good", "b": "good"})
    code, said, _ = check(tmp_path, f"--cache={tmp_path}/cache", "--seconds=1")
    assert (code, said["b"]) == (1, "never ends: solution, ended: limit of time")


def test_refused_and_unmapped_tasks_are_listed(tmp_path: Path, images: dict[str, Path]) -> None:
    write_task(tmp_path, "a", condition="true", solve="true", image="other:1")
    place = write_task(tmp_path, "b", condition="true", solve="true")
    (place / "task.toml").write_text("[[steps]]\nname = 'x'\n")
    write_task(tmp_path, "c", condition="true", solve="true")
    (tmp_path / "images.json").write_text(json.dumps({"shell": str(tmp_path / "missing.sif")}))
    code, said, output = check(tmp_path, f"--cache={tmp_path}/cache")
    assert code == 1
    assert "bad: a: has no image: a (other:1); name one in images\n" in output
    assert "bad: b: " in output
    assert "steps: tasks of several steps are not supported" in output
    assert "missing.sif: [Errno 2] No such file or directory" in said["c"]


def test_a_folder_without_tasks_is_one_line(tmp_path: Path) -> None:
    code, _, output = check(tmp_path)
    assert (code, output.count("\n")) == (2, 1)
    assert "has a task.toml; give a folder with tasks of Harbor's format" in output

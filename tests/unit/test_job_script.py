"""A job's command, checked before it is queued, and what the job does when its launcher ends.

Why: a job that cannot work should be refused before it is queued, and the shell lines that requeue it run
once a night. They run here under bash, with stand-ins for Slurm's commands. Not covered: NeMo-Run, which is
not in this environment, and a real Slurm (tests/integration/test_nemo_run.py).
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron import cli
from rpg_megatron.commands.launch import job_script
from rpg_megatron.commands.launch.job_script import (
    SETUP,
    SLURM,
    check_job,
    gpus_a_node,
    read_options,
    training_script,
)
from rpg_megatron.config import UserError

KNOWN: dict[str, Any] = {
    "account": str,
    "time": str,
    "nodes": int,
    "mem": str | None,
    "exclusive": bool | str | None,
    "container_mounts": list[str],
    "env_vars": dict[str, str],
    "ntasks_per_node": int,
}


def test_the_script_gives_every_word_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a job's folder"
    folder.mkdir()
    launcher = tmp_path / "the bin" / "rpg-megatron"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/bash\nprintf "<%s>" "$@"; echo; pwd\n')
    launcher.chmod(0o755)
    monkeypatch.chdir(folder)
    words = ["data.template=x 'y' \"$HOME\" {prompt}\n!", "seed=3"]
    script = training_script(Path("a c.yaml"), words, nodes=2, command="../the bin/rpg-megatron")
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    expected = ["train", str(folder / "a c.yaml"), "bridge.transport=process_group", *words]
    assert process.stdout == "".join(f"<{word}>" for word in expected) + f"\n{folder}\n"
    # A bare name is resolved where the job runs.
    assert " exec rpg-megatron train " in training_script(Path("c.yaml"))
    assert "process_group" not in training_script(Path("c.yaml"))


def test_a_script_that_nemo_run_would_change_is_refused() -> None:
    with pytest.raises(UserError, match="replaces /nemo_run in scripts"):
        training_script(Path("/data/nemo_run_jobs/c.yaml"))


# -- what the executor is asked for --------------------------------------------------------------------------


def test_options_have_the_executors_types() -> None:
    options = [
        "account=12",
        "mem=100",
        "time=12:00:00",
        "nodes=4",
        "exclusive=true",
        "container_mounts=[/a, '/b c:/d']",
    ]
    assert read_options([*options, "env_vars={NCCL_DEBUG: INFO}"], KNOWN) == {
        "account": "12",
        "mem": "100",
        "time": "12:00:00",  # a number in YAML
        "nodes": 4,
        "exclusive": True,
        "container_mounts": ["/a", "/b c:/d"],
        "env_vars": {"NCCL_DEBUG": "INFO"},
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("nodes", "must be KEY=VALUE"),
        ("acount=me", "has no such argument; did you mean account"),
        ("nodes=two", "--option nodes: 'two': Input should be a valid integer"),
        ("ntasks_per_node=8", "has no such argument"),  # one launcher a node
        ("container_mounts=[", "--option container_mounts: '\\['"),
        (
            "env_vars={WANDB_API_KEY: x}",
            "WANDB_API_KEY would be written to files that others can read.*export it instead",
        ),
    ],
)
def test_options_that_cannot_be(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options([option], KNOWN)


# -- before it is queued -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path) -> str:
    file = tmp_path / "train"
    file.write_text("")
    file.chmod(0o755)
    return str(file)


def test_a_job_that_can_work(config_file: Path, command: str) -> None:
    words = ["parallel.data=2", "engine.replicas=2", "engine.tensor=2", "training.minibatches=1"]
    settings = check_job(config_file, words, nodes=2, command=command, container=False)
    assert settings.bridge.transport == "process_group"
    assert gpus_a_node(settings, 2) == 0
    on_gpus = settings.model_copy(update={"device": "cuda"})
    assert gpus_a_node(on_gpus, 2) == 1 + 2
    shared = on_gpus.engine.model_copy(update={"colocated": True})
    assert gpus_a_node(on_gpus.model_copy(update={"engine": shared}), 1) == 2
    apart = on_gpus.cluster.model_copy(update={"trainer_nodes": 1, "engine_nodes": 1})
    assert gpus_a_node(on_gpus.model_copy(update={"cluster": apart}), 2) == 4
    spans = on_gpus.changed(
        engine={"replicas": 1, "tensor": 8}, cluster={"trainer_nodes": 1, "engine_nodes": 2}
    )
    assert gpus_a_node(spans, 3) == 4


@pytest.mark.parametrize(
    ("words", "nodes", "message"),
    [
        (["parallel.data=3"], 2, "3 trainer ranks .* cannot be spread evenly over 2 nodes"),
        (["bridge.transport=shared_memory", "parallel.data=2"], 2, "works within one node only"),
        (["parallel.tensor=3"], 1, "parallel: "),
        (["data.max_prompt_tokens=5000"], 1, "more than the model's 512 positions"),
        (["training.stepz=1"], 1, "training.steps"),
        (["model.path=/nowhere"], 1, "/nowhere"),
    ],
)
def test_a_job_that_cannot_work_is_refused(
    config_file: Path, command: str, words: list[str], nodes: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_job(config_file, ["engine.replicas=2", *words], nodes=nodes, command=command, container=False)


def test_a_command_that_is_not_there_or_has_no_torch(config_file, tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="gone/rpg-megatron was not found"):
        check_job(config_file, [], nodes=1, command="gone/rpg-megatron", container=False)
    check_job(config_file, [], nodes=1, command="gone/rpg-megatron", container=True)  # the container has it
    executable = tmp_path / "venv" / "rpg-megatron"
    executable.parent.mkdir()
    executable.write_text("")
    executable.chmod(0o755)
    monkeypatch.setattr(job_script.sys, "executable", str(executable.with_name("python")))
    check_job(config_file, [], nodes=1, command=str(executable), container=False)
    monkeypatch.setattr(job_script, "has_torch", lambda: False)
    with pytest.raises(UserError, match="belongs to this environment, which has no torch"):
        check_job(config_file, [], nodes=1, command=str(executable), container=False)


@pytest.mark.skipif(find_spec("nemo_run") is not None, reason="this environment has NeMo-Run")
def test_without_nemo_run_one_line_says_how_to_get_it(config_file, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["launch", str(config_file), "--dryrun"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: NeMo-Run cannot be imported")
    assert "requirements/launch.txt" in error
    assert error.count("\n") == 1


LOADED = """
import importlib.metadata, sys
import rpg_megatron.commands.launch.job_script, rpg_megatron.cli
packages = importlib.metadata.packages_distributions()
print(*{d for name in list(sys.modules) for d in packages.get(name.partition(".")[0], ())}, sep="\\n")
"""


def test_its_environment_has_what_the_command_imports() -> None:
    process = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    file = Path(__file__).parents[2] / "requirements" / "launch.txt"
    listed = {line.partition("==")[0] for line in file.read_text().splitlines()}
    loaded = {name for name in process.stdout.split() if name not in ("rpg-megatron", "setuptools")}
    assert {"typer", "msgspec"} <= loaded
    assert {re.sub("[-_.]+", "-", name).lower() for name in loaded} <= {
        re.sub("[-_.]+", "-", name).lower() for name in listed
    }


# -- when the launcher ends ----------------------------------------------------------------------------------


def test_nemo_run_requeues_as_the_scripts_do() -> None:
    """A package that is installed has the lines too: they are data of it, and one file in a checkout."""
    root = Path(__file__).parents[2]
    file, packed = root / "slurm" / "requeue.sh", Path(job_script.__file__).with_name("requeue.sh")
    assert packed.read_bytes() == file.read_bytes()
    lines = file.read_text().rstrip()
    assert lines.endswith("\n\n" + SETUP.partition("CHAIN=1\n")[2])
    assert "trap finish EXIT" in SETUP
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["rpg_megatron.commands.launch"] == ["*.sh"]


SHOW, UPDATE = "scontrol show job 77\n", "scontrol update JobId=77"


@pytest.mark.parametrize(
    ("code", "array", "state", "expected_code", "commands"),
    [
        (0, False, "RUNNING", 0, ""),
        (2, False, "RUNNING", 2, ""),
        (75, False, "RUNNING", 75, "scontrol requeue 77\n"),
        (75, False, "COMPLETING", 75, ""),  # it is being cancelled
        (75, True, "RUNNING", 0, ""),  # the next task resumes
        (0, True, "RUNNING", 0, "scancel --state=PENDING 70\n"),
        (1, True, "RUNNING", 1, ""),
        ("60 n2", False, "RUNNING", 1, f"{SHOW}scontrol requeue 77\n{UPDATE} ExcNodeList=n9,n2\n"),
        ("240", False, "RUNNING", 1, f"scontrol requeue 77\n{UPDATE} StartTime=now+240\n"),
        ("60 n2", False, "COMPLETING", 1, ""),
    ],
)
def test_the_end_of_a_job(
    tmp_path: Path, code: int | str, array: bool, state: str, expected_code: int, commands: str
) -> None:
    """As NeMo-Run's script ends: verbosely, with the launcher's code. code: or what it writes to restart."""
    for name in ("scontrol", "scancel"):
        said = "[ $1 != show ] || echo 'ReqNodeList=(null) ExcNodeList=n9'"
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> "{tmp_path}/did"\n{said}\n')
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho {state}\n")
    for name in ("scontrol", "scancel", "squeue"):
        (tmp_path / name).chmod(0o755)
    command = f"(exit {code})"
    if isinstance(code, str):
        command = f"(echo {code} > $RPG_RESTART_FILE; exit 1)"
    script = f"set -evx\nset +e\n{SETUP}\nkill -USR1 $$; kill -TERM $$\n{command}\nexitcode=$?\nset -e\n"
    script += "if [ $exitcode -ne 0 ]; then\n    exit $exitcode\nfi\n"
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    task = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    environment |= {"SLURM_CPUS_ON_NODE": "4"} | (task if array else {})
    process = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == expected_code, process.stderr
    assert ((tmp_path / "did").read_text() if (tmp_path / "did").exists() else "") == commands
    assert ("requeued\n" in process.stdout) == bool(commands and not array)
    assert not list(tmp_path.glob(".restart*"))


def test_a_job_gets_all_memory_of_its_nodes() -> None:
    # --exclusive gives all cores; memory stays at the partition's default for one job.
    scripts = list((Path(__file__).parents[2] / "slurm").glob("*.sbatch"))
    assert scripts
    assert [file.name for file in scripts if "#SBATCH --mem=0\n" not in file.read_text()] == []
    assert SLURM["mem"] == "0"

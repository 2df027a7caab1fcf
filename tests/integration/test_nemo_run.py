"""``rpg-megatron launch``: the jobs that NeMo-Run makes of a run are started here, and by a real Slurm.

Why: the script that requeues a night's job is NeMo-Run's, with a few lines of ours in it; whether they work
together shows only when it runs. NeMo-Run has an environment of its own, which RPG_LAUNCH_PYTHON names (its
python); otherwise it is built from requirements/launch.txt. A small program replaces the launcher, except
where real training is said. Not covered: Docker and SSH (none here), containers, several machines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.slurm import SECRET, SMALL, TWO, Slurm, missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}")

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
TRAINING = Path(sys.executable).parent / "rpg-megatron"

UNCHECKED = "warning: data: not checked here without the python package numpy\n"
"""The first line of the command's stderr in this environment."""
ECHO = """#!/bin/bash
# Says what it was given, and where; told to, it waits for a warning and saves.
echo "on ${SLURMD_NODENAME:-here}, ${SRUN_CPUS_PER_TASK:-?} cores, in $PWD: $*"
if [ -e "$0.saves" ] && [ ! -e "$0.saved" ]; then
    trap 'sleep 1; touch "$0.saved"; echo saved; exit 75' USR1 TERM INT
    echo waiting
    for _ in $(seq 1200); do sleep 0.1; done
fi
if [ -e "$0.fails" ]; then exit 2; fi
echo done
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The python of an environment that has NeMo-Run."""
    if named := os.environ.get("RPG_LAUNCH_PYTHON"):
        return named
    folder = tmp_path_factory.mktemp("launch") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [
        folder / "bin" / "pip",
        "install",
        "-q",
        "--no-deps",
        "-r",
        ROOT / "requirements" / "launch.txt",
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NeMo-Run cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin" / "python")


class Launch:
    """``rpg-megatron launch`` from a folder with a space in its name."""

    def __init__(self, python: str, folder: Path, base: dict[str, str] | None = None):
        self.folder, self.home = folder / "a job", folder / "nemo"
        self.folder.mkdir()
        self.echo = folder / "launcher"
        self.echo.write_text(ECHO)
        self.echo.chmod(0o755)
        self.environment = {
            **(base or os.environ),
            "PYTHONPATH": str(ROOT),
            "NEMORUN_HOME": str(self.home),
            "RPG_MEGATRON": str(self.echo),
            "WANDB_API_KEY": SECRET,
            "DOCKER_HOST": f"unix://{folder}/no-docker",
        }
        self.command = [python, "-m", "rpg_megatron.cli", "launch", str(QUICKSTART)]

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*self.command, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr.removeprefix(UNCHECKED) if code else done.stdout

    def logs(self) -> str:
        """The output of the jobs."""
        logs = [*self.home.rglob("*.out"), *self.home.rglob("combined.log")]
        return "\n".join(log.read_text() for log in sorted(logs))


@pytest.fixture
def local(python: str, tmp_path: Path) -> Launch:
    return Launch(python, tmp_path)


@pytest.fixture
def cluster(python: str, tmp_path: Path, slurm: Slurm) -> Launch:
    return Launch(python, tmp_path, slurm.environment)


# -- here ----------------------------------------------------------------------------------------------------


def test_a_run_here_and_its_code(local: Launch) -> None:
    local("--executor", "local", "seed=3", "data.template=a b {prompt}")
    assert f"in {local.folder}: train {QUICKSTART} seed=3 data.template=a b {{prompt}}\n" in local.logs()
    Path(f"{local.echo}.fails").touch()
    err = local("--executor", "local", "seed=4", code=1)
    assert re.match(r"error: the run failed; the end of .*combined.log:\non here, .* seed=4\n", err), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_a_run_here_which_saves(local: Launch, number: signal.Signals) -> None:
    Path(f"{local.echo}.saves").touch()
    process = subprocess.Popen(
        [*local.command, "--executor", "local"],
        cwd=local.folder,
        env=local.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "waiting" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "saved" in out
    assert Path(f"{local.echo}.saved").exists()


def test_what_cannot_be_is_one_line(local: Launch) -> None:
    for words, message in (
        (["-o", "nodes=2"], "cannot be spread evenly over 2 nodes"),
        (["-o", "noodes=2"], "has no such argument; did you mean nodes?"),
        (["--executor", "pbs"], "is none of slurm, local, docker"),
        (["--executor", "docker"], "needs an image"),
        (["--executor", "docker", "-o", "container_image=x"], "Docker: "),
        (
            ["-o", f"env_vars={{WANDB_API_KEY: {SECRET}}}"],
            "WANDB_API_KEY would be written to files that others can read",
        ),
    ):
        err = local(*words, "parallel.tensor=1", code=2)
        assert message in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert SECRET not in err
    assert list(local.home.rglob("*.sh")) == []


def test_a_dry_run_starts_nothing(local: Launch) -> None:
    assert local("--executor", "local", "--dryrun").startswith("cd ")
    plan = local("--executor", "docker", "-o", "container_image=rpg:1", "--dryrun")
    assert "# container_image: rpg:1\n" in plan
    assert f"# volumes: ['{local.folder}:{local.folder}']\n" in plan
    assert list(local.home.rglob("*.sh")) == []


def test_the_recipe(local: Launch, python: str) -> None:
    recipe = [python, ROOT / "examples" / "nemo_run_recipe.py", QUICKSTART, "seed=3"]
    done = subprocess.run(
        recipe, cwd=local.folder, env=local.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rate in ("1e-6", "3e-6"):
        assert f"train {QUICKSTART} name=lr-{rate} optimizer.lr={rate} seed=3\n" in local.logs()


def test_the_quickstart_here(local: Launch) -> None:
    """Real training."""
    out = local("--executor", "local", "--command", str(TRAINING), "training.steps=2")
    assert "step 2/2" in out
    assert "held-out accuracy" in out
    assert (local.folder / "runs" / "quickstart-001" / "report.html").exists()


# -- by Slurm ------------------------------------------------------------------------------------------------


def submit(slurm: Slurm, script: str, folder: Path) -> str:
    """The printed script, as a user would submit it."""
    file = folder / "job.sbatch"
    file.write_text(script)
    slurm.run("sbatch", "--test-only", file, cwd=folder)
    return slurm.run("sbatch", "--parsable", file, cwd=folder).strip()


def submitted(launch: Launch) -> str:
    out = launch("-o", "time=00:30:00")
    match = re.fullmatch(r"job (\d+), its logs: (.*)\n", out)
    assert match, out
    assert Path(match[2]).is_dir()
    return match[1]


def end_of(slurm: Slurm, number: str, seconds: float = 900) -> dict[str, str]:
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    slurm.wait(lambda: slurm.job(number)["JobState"] in over, seconds)
    return slurm.job(number)


@needs_slurm
def test_the_script_of_a_dry_run_is_accepted_and_runs_on_every_node(slurm: Slurm, cluster: Launch) -> None:
    words = ["parallel.tensor=1", "parallel.data=2", "engine.replicas=2", "data.template=a b {prompt}"]
    script = cluster("-o", "nodes=2", "-o", "time=00:30:00", "--dryrun", *words)
    assert SECRET not in script
    number = submit(slurm, script, cluster.folder)
    assert end_of(slurm, number, 120)["JobState"] == "COMPLETED", cluster.logs()
    logs = cluster.logs()
    for node in ("n1", "n2"):
        arguments = f"train {QUICKSTART} bridge.transport=process_group {' '.join(words)}"
        assert f"on {node}, {os.cpu_count()} cores, in {cluster.folder}: {arguments}\n" in logs
    assert SECRET not in logs


@needs_slurm
def test_a_warned_job_is_requeued_and_a_failed_one_is_not(slurm: Slurm, cluster: Launch) -> None:
    Path(f"{cluster.echo}.saves").touch()
    number = submitted(cluster)
    slurm.wait(lambda: "waiting" in cluster.logs(), 60)
    slurm.run("scancel", "--signal=USR1", number)
    slurm.wait(lambda: "saved; requeued" in cluster.logs(), 60)

    def again() -> bool:  # Slurm lets it wait for two minutes
        facts = slurm.job(number)
        return facts["Restarts"] == "1" and facts["JobState"] in ("RUNNING", "COMPLETED")

    slurm.wait(again, 400)
    assert end_of(slurm, number)["JobState"] == "COMPLETED", cluster.logs()
    Path(f"{cluster.echo}.fails").touch()
    number = submitted(cluster)
    facts = end_of(slurm, number)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), cluster.logs()


@needs_slurm
def test_a_job_that_slurm_refuses_is_one_line_and_leaves_nothing(cluster: Launch) -> None:
    err = cluster("-o", "partition=nowhere", code=2)
    assert re.match(r"error: sbatch .*: sbatch: error: .*invalid partition", err), err
    assert list((cluster.home / "experiments").rglob("*.sh")) == []


@needs_slurm
def test_real_training_on_two_nodes(slurm: Slurm, cluster: Launch) -> None:
    """The printed script, with real ranks and engines."""
    words = ["--command", str(TRAINING), *SMALL, *TWO]
    number = submit(slurm, cluster("-o", "nodes=2", "--dryrun", *words), cluster.folder)
    assert end_of(slurm, number)["JobState"] == "COMPLETED", cluster.logs()
    assert "step 2/2" in cluster.logs()
    end = time.monotonic() + 60
    while slurm.processes():
        assert time.monotonic() < end
        time.sleep(0.2)

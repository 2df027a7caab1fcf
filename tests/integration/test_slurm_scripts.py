"""What the scripts in slurm/ do around the launcher, under a real Slurm: requeue, chain, cancel, lose a node.

Why: these paths are taken at night, when nobody looks. Slurm's own daemons run here, two "nodes" of
them on one machine; jobs are submitted from a folder that is not the repository, with spaces in every path.
The launcher is a small program that prints its arguments, or the real launcher with stand-ins for engines,
sampler and ranks, so that each test takes seconds. Not covered: real engines and
ranks (test_slurm.py), containers but for the options that srun is given, cgroup and affinity plugins.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher_pair import DRIVER, ENGINE, STAND_IN
from tests.support.slurm import Job, Slurm, missing

ROOT = Path(__file__).parents[2]
TWO = ("parallel.data=2", "engine.replicas=2", "cluster.min_bandwidth=0")
needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}")

ECHO = """#!/bin/bash
# Says what it was given; the first time it waits for a warning and saves.
for word in "$@"; do echo "<$word>"; done
echo "in $PWD"
if [ -e "$0.saves" ] && [ ! -e "$0.saved" ]; then
    trap 'touch "$0.saved"; echo saved; exit 75' USR1
    echo waiting
    for _ in $(seq 1200); do sleep 0.1; done
fi
echo done
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """The small program. Its name has no space: Slurm's linuxproc plugin signals no process that has one."""
    file = tmp_path / "a folder" / "launcher"
    file.parent.mkdir()
    file.write_text(ECHO)
    file.chmod(0o755)
    return file


def wanting_to_save(echo: Path) -> Path:
    echo.with_name(f"{echo.name}.saves").touch()
    return echo


@pytest.mark.long
@needs_slurm
def test_a_warned_job_is_requeued_with_all_its_words(slurm: Slurm, tmp_path: Path, echo: Path) -> None:
    words = ("a config.yaml", "data.template=x y {prompt}", "seed=3")
    job = Job(slurm, tmp_path, "train_single_node", *words, launcher=wanting_to_save(echo))
    job.wait_for("waiting")
    slurm.run("scancel", "--signal=USR1", job.number)
    job.wait_for("saved; requeued")
    job.wait_for_restart()
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.logs()
    echoed = ["<train>", *(f"<{word}>" for word in words), f"in {job.folder}"]
    noise = ("srun:", "slurmstepd", "User defined signal")
    lines = [line for line in job.output.splitlines() if not line.startswith(noise)]
    assert lines == [*echoed, "waiting", "saved", "saved; requeued", *echoed, "done"]


@pytest.mark.long
@needs_slurm
def test_in_a_chain_the_next_task_goes_on_and_the_rest_is_dropped(
    slurm: Slurm, tmp_path: Path, echo: Path
) -> None:
    job = Job(
        slurm,
        tmp_path,
        "train_single_node",
        "c.yaml",
        launcher=wanting_to_save(echo),
        options=("--array=1-4%1",),
        CHAIN="1",
    )
    slurm.wait(lambda: any("waiting" in log.read_text() for log in job.folder.glob("*.log")), 60)
    # It reaches the task that runs, and exits with 1 because of those that wait.
    subprocess.run(["scancel", "--signal=USR1", job.number], env=slurm.environment, check=False)
    slurm.wait(lambda: job.number not in slurm.run("squeue", "-h", "-o", "%F").split(), 120)
    logs = sorted(job.folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    assert len(logs) == 2, [log.read_text() for log in logs]
    assert "saved" in logs[0].read_text().splitlines()
    assert "requeued" not in logs[0].read_text()
    assert logs[1].read_text().endswith("done\n")


@needs_slurm
def test_each_task_of_an_array_is_a_run(slurm: Slurm, tmp_path: Path, echo: Path) -> None:
    """Two tasks are two seeds; the first to finish cancels nothing. A file of yours is sourced before."""
    setup = tmp_path / "my setup.sh"
    setup.write_text("export MODEL_ROOT='/models here'\n")
    echo.write_text(ECHO + 'echo "root $MODEL_ROOT"\n')
    options, variables = ("--array=3,5%1",), {"JOB_SETUP": str(setup)}
    job = Job(slurm, tmp_path, "train_single_node", "c.yaml", launcher=echo, options=options, **variables)
    slurm.wait(lambda: job.number not in slurm.run("squeue", "-h", "-o", "%F").split(), 120)
    logs = [log.read_text().splitlines() for log in job.folder.glob("*.log")]
    tasks = sorted([word for word in log if word[0] == "<"] for log in logs)
    assert tasks == [["<train>", "<--task>", f"<{task}>", "<c.yaml>"] for task in (3, 5)]
    assert all(log.count("root /models here") == 1 for log in logs)
    assert not list(job.folder.glob(".restart*"))


@needs_slurm
def test_a_cancelled_job_is_not_requeued(slurm: Slurm, tmp_path: Path, echo: Path) -> None:
    echo.write_text(ECHO.replace("USR1", "TERM"))
    job = Job(slurm, tmp_path, "train_single_node", "c.yaml", launcher=wanting_to_save(echo))
    job.wait_for("waiting")
    slurm.run("scancel", job.number)
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.logs()


@needs_slurm
def test_a_failure_is_the_jobs(slurm: Slurm, tmp_path: Path, echo: Path) -> None:
    echo.write_text("#!/bin/bash\necho 'error: no such thing' >&2\nexit 2\n")
    job = Job(slurm, tmp_path, "train_single_node", "c.yaml", launcher=echo)
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    assert "error: no such thing" in job.output


@needs_slurm
def test_conversions_get_their_words(slurm: Slurm, tmp_path: Path, echo: Path) -> None:
    words = ("hf-to-megatron", "--hf", "a model", "--out", "b c")
    job = Job(slurm, tmp_path, "convert", *words, launcher=echo)
    assert job.wait_for_end(120)["JobState"] == "COMPLETED"
    assert [w for w in job.output.splitlines() if w[0] == "<"] == [
        "<convert>",
        *(f"<{word}>" for word in words),
    ]


@pytest.mark.long
@needs_slurm
def test_an_evaluation_gets_its_words_and_goes_on_when_it_was_warned(
    slurm: Slurm, tmp_path: Path, echo: Path
) -> None:
    words = ("a model", "--suite", "aime24,amc23", "-n", "32")
    job = Job(slurm, tmp_path, "eval", *words, launcher=wanting_to_save(echo))
    job.wait_for("waiting")
    slurm.run("scancel", "--signal=USR1", job.number)
    job.wait_for("requeued")
    job.wait_for_restart()
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.logs()
    echoed = ["<eval>", "<--engines>", "<8>", *(f"<{word}>" for word in words)]
    assert [line for line in job.output.splitlines() if line[0] == "<"] == 2 * echoed


# -- two launchers -------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """The real launcher, whose children are stand-ins that record where they run."""
    note = "with open(here / 'nodes', 'a') as f: f.write(name + ' ' + os.environ['SLURMD_NODENAME'] + '\\n')"
    text = STAND_IN.replace("    plan = json", f"    {note}\n    plan = json")
    (tmp_path / "stand_in.py").write_text(text)
    (tmp_path / "stand_in_engine.py").write_text(ENGINE)
    (tmp_path / "stand_in_sampler.py").write_text("import stand_in; stand_in.act('sampler')")
    (tmp_path / "stand_in_rank.py").write_text(
        "import os, stand_in; stand_in.act('rank_' + os.environ['RANK'])"
    )
    (tmp_path / "driver.py").write_text(DRIVER)
    well = "import sys; open(sys.argv[1] + '/summary.json', 'w').write('{}'); os._exit(0)"
    (tmp_path / "plan.json").write_text(json.dumps({"rank_0": well, "rank_1": "os._exit(0)"}))
    file = tmp_path / "launcher"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    file.write_text(f'#!/bin/bash\nPYTHONPATH="{path}" exec "{sys.executable}" "{tmp_path}/driver.py" "$@"\n')
    file.chmod(0o755)
    return file


def places(folder: Path) -> dict[str, str]:
    file = folder / "nodes"
    return dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}


@needs_slurm
def test_trainer_nodes_and_engine_nodes(
    slurm: Slurm, tmp_path: Path, config_file: Path, stand_ins: Path
) -> None:
    words = (str(config_file), *TWO, "runs=runs")
    job = Job(slurm, tmp_path, "train_disaggregated", *words, launcher=stand_ins)
    slurm.wait(lambda: len(places(tmp_path)) == 5, 120)
    assert places(tmp_path) == {
        "rank_0": "n1",
        "rank_1": "n1",
        "sampler": "n1",
        "engine_0": "n2",
        "engine_1": "n2",
    }
    job.wait_for("engine 1 is up")
    assert slurm.sockets_open_to_others() == []
    (tmp_path / "go").touch()
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.logs()
    job.assert_no_secret_shows()


@pytest.mark.long
@needs_slurm
def test_a_node_that_fails_ends_the_job_with_the_reason(
    slurm: Slurm, tmp_path: Path, config_file: Path, stand_ins: Path
) -> None:
    words = (str(config_file), *TWO)
    # By default Slurm requeues a job whose node has failed.
    job = Job(slurm, tmp_path, "train_multi_node", *words, launcher=stand_ins, options=("--no-requeue",))
    slurm.wait(lambda: len(places(tmp_path)) == 5, 120)
    slurm.fail_node("n2")
    try:
        facts = job.wait_for_end(240)
        assert facts["JobState"] in ("FAILED", "NODE_FAIL"), job.logs()
        assert "error: node 1 (n2) is lost: " in job.output, job.logs()
        assert "requeued" not in job.output
    finally:
        slurm.start_node("n2")
        slurm.wait(lambda: slurm.states() == {"idle"}, 120)


def test_containers_by_one_variable(tmp_path: Path) -> None:
    """The options that pyxis knows; without Slurm, with a ``srun`` that prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/bash\nfor word in "$@"; do echo "<$word>"; done\n')
    (tmp_path / "srun").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_CPUS_ON_NODE": "4",
        "CONTAINER_IMAGE": "an image.sqsh",
        "CONTAINER_MOUNTS": "/a b:/a b",
        "HF_HOME": "/cache",
        "SLURM_JOB_ID": "7",
    }
    for script in ("train_single_node", "train_multi_node", "train_disaggregated", "convert", "eval"):
        environment |= {"SLURM_JOB_NUM_NODES": "2"}
        done = subprocess.run(
            ["bash", ROOT / "slurm" / f"{script}.sbatch", "x"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        words = done.stdout.splitlines()
        assert {
            "<--container-image=an image.sqsh>",
            f"<--container-mounts={tmp_path}:{tmp_path},/cache:/cache,/a b:/a b>",
            f"<--container-workdir={tmp_path}>",
            "<--ntasks-per-node=1>",
        } <= set(words)
        assert words[words.index("<rpg-megatron>") + 1] in ("<train>", "<convert>", "<eval>")


# -- outside of a job script ---------------------------------------------------------------------------------


@pytest.mark.long
@needs_slurm
def test_the_doctor_tells_of_every_node(slurm: Slurm, tmp_path: Path, config_file: Path) -> None:
    """One of the two has a limit that is too low; each examines itself, and prints its name."""
    lame = tmp_path / "doctor"
    command = f'exec "{sys.executable}" -m rpg_megatron.cli doctor "$@"'
    lame.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && ulimit -n 256\n{command}\n')
    lame.chmod(0o755)
    environment = slurm.environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    spread = ["parallel.data=2", "engine.replicas=2", "bridge.transport=process_group"]
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", lame, config_file, *spread]

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = run(*step)
    assert done.returncode == 1
    assert re.search(
        r"n2 +open files +FAILED +open files are limited to 256.*\n +fix: raise the hard limit", done.stdout
    )
    assert {"n1: all checks passed", "n2: 1 failed"} <= set(done.stdout.splitlines())
    run("srun", "--output=doctor-%t.json", *step[1:], "--json")
    reports = [json.loads((tmp_path / f"doctor-{task}.json").read_text()) for task in range(2)]
    nodes = [report["nodes"][0] for report in reports]
    failed = {n["node"]: {c["name"] for c in n["checks"] if c["verdict"] == "failed"} for n in nodes}
    assert failed == {"n1": set(), "n2": {"open files"}}
    reduced = [c["found"] for node in nodes for c in node["checks"] if c["name"] == "between nodes"]
    assert len(reduced) == 2
    assert all(re.fullmatch(r"all-reduce over 2 nodes, gloo: \d+\.\d GB/s each", text) for text in reduced)
    # Within an allocation, but not by srun: this machine alone, and the job's time.
    alone = run("salloc", "--nodes=2", "--time=30", lame, config_file, "--json")
    assert alone.returncode == 0, alone.stdout
    (node,) = json.loads(alone.stdout)["nodes"]
    (walltime,) = (c for c in node["checks"] if c["name"] == "walltime")
    assert walltime["verdict"] != "not applicable"


@pytest.mark.long
@needs_slurm
def test_in_an_interactive_allocation_a_run_is_one_node(
    slurm: Slurm, tmp_path: Path, config_file: Path, stand_ins: Path
) -> None:
    words = ["salloc", "--nodes=2", stand_ins, "train", config_file, "parallel.data=2", "runs=runs"]
    environment = slurm.environment | {"SLURMD_NODENAME": "none"}  # which the stand-ins write down
    output = tmp_path / "said"
    with output.open("w") as out:
        process = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=out, stderr=out)
    # The ranks end when they may; the engine's stand-in may need longer than they to start.
    slurm.wait(lambda: len(places(tmp_path)) == 4 or process.poll() is not None, 120)
    (tmp_path / "go").touch()
    assert process.wait(120) == 0, output.read_text()
    assert "waiting for" not in output.read_text()
    assert set(places(tmp_path)) == {"rank_0", "rank_1", "sampler", "engine_0"}
    assert (tmp_path / "runs" / "tiny-001" / "report.html").exists()

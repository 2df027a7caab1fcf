"""A study under a real Slurm: one array of two settings and three seeds, preempted, requeued, then evaluated.

Why: a study is days of many nodes, and its tasks are preempted. A task that is lost, or that two tasks do,
makes its table wrong. Slurm preempts by the priority of partitions, as clusters do: it warns with SIGTERM and
would requeue after a grace time. Real engines and ranks, tiny model. Not covered: GPUs, several machines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg_megatron.config.study import load_study
from rpg_megatron.launcher.resume import find_finished
from tests.support.runs import QUICKSTART
from tests.support.same_runs import read_rows
from tests.support.slurm import SMALL, Slurm, missing, start_slurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}"),
    pytest.mark.timeout(2400),
]

ROOT = Path(__file__).parents[2]
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
STEPS = 8
STUDY = """
config: {config}
name: rates
settings: {settings}
grid:
  optimizer.lr: [1.0e-4, 3.0e-4]
seeds: [1, 2, 3]
at_once: 2
"""


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    yield from start_slurm(2, PREEMPTION)


def run(cluster: Slurm, folder: Path, *words: str | Path) -> str:
    environment = cluster.environment | {
        "RPG_MEGATRON": str(Path(sys.executable).parent / "rpg-megatron"),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), cluster.environment["PATH"]]),
    }
    return cluster.run(*words, cwd=folder, env=environment)


def test_a_study(cluster: Slurm, tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    words = [word for word in SMALL if not word.startswith(("training.steps", "evaluation", "export"))]
    words += [
        f"training.steps={STEPS}",
        "parallel.tensor=1",
        "evaluation.every=4",
        "evaluation.data.limit=32",
    ]
    settings = json.dumps(dict(word.split("=", 1) for word in words) | {"runs": str(tmp_path / "runs")})
    file.write_text(STUDY.format(config=QUICKSTART, settings=settings))
    submitted = run(cluster, tmp_path, "rpg-megatron", "study", file)
    (number,) = re.findall(r"Submitted batch job (\d+)", submitted)
    # Held until all tasks are finished; the run's number is not known yet.
    chained = run(
        cluster,
        tmp_path,
        *("sbatch", "--parsable", f"--dependency=afterok:{number}", ROOT / "slurm" / "eval.sbatch"),
        *("rates-lr0.0003-s2", "--data", QUICKSTART.parent / "quickstart" / "heldout.jsonl"),
        *("--device", "cpu", "-n", "1", "--out", tmp_path / "evaluated", "data.limit=32"),
    ).strip()
    logs = {task: tmp_path / f"log-{task}" for task in range(1, 7)}
    assert logs

    def states() -> dict[str, str]:
        text = cluster.run("squeue", "-h", "-r", "-o", "%K %T", "-j", number)
        return dict(line.split() for line in text.splitlines())

    def both_train() -> bool:
        running = [task for task, state in states().items() if state == "RUNNING"]
        texts = [log.read_text() for log in tmp_path.glob("rates-*.log")]
        return len(running) == 2 and sum("step 2/" in text for text in texts) >= 2

    cluster.wait(both_train, 600)
    preempted = {task for task, state in states().items() if state == "RUNNING"}
    urgent = cluster.run(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 3"),
    ).strip()
    cluster.wait(lambda: cluster.job(urgent)["JobState"] == "COMPLETED", 300)
    restarted = {t for t in preempted if cluster.job(f"{number}_{t}")["Restarts"] == "1"}
    assert restarted == preempted, states()
    for task in preempted:
        cluster.run("scontrol", "update", f"JobId={number}_{task}", "StartTime=now")
    assert cluster.job(chained)["JobState"] == "PENDING"
    cluster.wait(lambda: not states(), 1500)
    cluster.wait(lambda: cluster.job(chained)["JobState"] in ("COMPLETED", "FAILED"), 300)
    everything = "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert cluster.job(chained)["JobState"] == "COMPLETED", everything[-3000:]
    assert everything.count("saved; requeued") == 2

    finished = [find_finished(run.settings) for run in load_study(file).runs]
    assert [folder and folder.name for folder in finished] == [
        f"rates-lr{rate}-s{seed}-001" for seed in (1, 2, 3) for rate in ("0.0001", "0.0003")
    ]
    assert len(list((tmp_path / "runs").iterdir())) == 6
    for folder in finished:
        assert folder is not None
        assert [row["step"] for row in read_rows(folder)] == list(range(STEPS + 1))
    done = json.loads(next((tmp_path / "evaluated").rglob("summary.json")).read_text())
    assert "rates-lr0.0003-s2-001" in json.dumps(done)

    page = Path(
        run(cluster, tmp_path, "rpg-megatron", "report", file, "--out", tmp_path / "study.html").strip()
    )
    assert "95%" in page.read_text()
    assert "all 6 runs are finished" in run(cluster, tmp_path, "rpg-megatron", "study", file)
    if keep := os.environ.get("RPG_KEEP"):
        subprocess.run(["cp", "-r", tmp_path, keep], check=True)

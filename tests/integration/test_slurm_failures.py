"""Failures of the machine under a real Slurm: the job is requeued without the node, and goes on.

Why: a node fails on the tenth day of a run of two weeks, at night. Three "nodes" of Slurm's daemons on one
machine, of which a job has two. A node dies as by a power failure (slurmd and all that it started) while a
real run is in a rollout, in an update and in a save; the rows that follow equal those of an undisturbed run.
A failure of the user's is not requeued. Not covered: which failure is whose (tests/unit/test_failures.py),
several machines, GPUs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.data.rollout_files import rollouts_complete, rollouts_file
from rpg_megatron.launcher.environment import ends_of_starts
from tests.support.moments import count_rows
from tests.support.runs import QUICKSTART
from tests.support.same_runs import compare_rows
from tests.support.slurm import SMALL, TWO, Job, Slurm, missing, start_slurm

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}"),
    pytest.mark.timeout(1800),
]

FAILS = """#!/bin/bash
# Fails in the first start, in words that the real launcher writes; a later one is done.
echo "start ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME"
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
    [ "$SLURM_NODEID" = 0 ] && echo "300 n2" > "$RPG_RESTART_FILE"
    exit 1
fi
echo done
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Slurm]:
    """A cluster with a node to spare."""
    yield from start_slurm(3)


def test_a_job_is_requeued_without_the_node(three: Slurm, tmp_path: Path) -> None:
    """In addition to those that the user leaves out; after a while that the script sets."""
    launcher = tmp_path / "launcher"
    launcher.write_text(FAILS)
    launcher.chmod(0o755)
    options = ("--nodes=1", "--exclude=n1")
    job = Job(three, tmp_path, "train_multi_node", "c", launcher=launcher, options=options)

    def seconds_to_start() -> float:
        facts = three.job(job.number)
        waits = (
            facts["Restarts"] == "1" and facts["JobState"] == "PENDING" and facts["StartTime"] != "Unknown"
        )
        return datetime.fromisoformat(facts["StartTime"]).timestamp() - time.time() if waits else 0.0

    three.wait(lambda: 200 < seconds_to_start() <= 300, 60)  # Slurm alone would hold it for 120
    assert three.job(job.number)["ExcNodeList"] == "n1,n2"
    job.start_now()
    facts = job.wait_for_end(120)
    assert (facts["JobState"], facts["NodeList"]) == ("COMPLETED", "n3"), job.logs()
    assert job.output.count("start 0 on n2") == job.output.count("start 1 on n3") == 1
    assert not list(job.folder.glob(".restart*"))


# -- whole runs ----------------------------------------------------------------------------------------------

STEPS = 6
RUN = [
    *(word for word in SMALL if not word.startswith("training.steps")),
    *TWO,
    f"training.steps={STEPS}",
    "checkpoint={every: 2, keep: 2, asynchronous: false}",
    "cluster={min_bandwidth: 0, silence: 20}",
]


@pytest.fixture(scope="module")
def undisturbed(three: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    job = Job(three, tmp_path_factory.mktemp("straight"), "train_multi_node", str(QUICKSTART), *RUN)
    facts = job.wait_for_end()
    assert facts["JobState"] == "COMPLETED", job.logs()
    return job.rows()


def in_rollout(run: Path, since: int) -> bool:
    step = count_rows(run)  # rows of steps 0 to step - 1
    return step >= since and not rollouts_complete(rollouts_file(run, step)) and not is_saving(run)


def in_update(run: Path, since: int) -> bool:
    step = count_rows(run)
    return step >= since and rollouts_complete(rollouts_file(run, step)) and not is_saving(run)


def in_save(run: Path, since: int) -> bool:
    """Not in the first one: without a checkpoint the run begins again, in another folder."""
    return count_rows(run) >= since and is_saving(run) and bool(list_steps(run))


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.part"))


@pytest.mark.long
@pytest.mark.parametrize("moment", [in_rollout, in_update, in_save])
def test_a_node_dies(
    three: Slurm, tmp_path: Path, undisturbed: list[dict], moment: Callable[[Path, int], bool]
) -> None:
    job = Job(three, tmp_path, "train_multi_node", str(QUICKSTART), *RUN)
    job.wait_for("step 2/6")
    hold(three, job, moment)
    before = list_steps(job.run)
    three.fail_node("n2")
    try:
        signal_ranks(three, signal.SIGCONT)
        three.wait(lambda: three.job(job.number)["Restarts"] == "1", 300)
        job.start_now()
        facts = job.wait_for_end()
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.logs()
        assert facts["NodeList"] == "n[1,3]"
        # Slurm itself may notice first; then it ends the job, whose last words are lost.
        if "requeued" in job.output:
            assert facts["ExcNodeList"] == "n2"
            assert "error: node 1 (n2) is lost: " in job.output
            assert "\nrestart 1 of 3 in 120 s, without n2\n" in job.output
            assert ends_of_starts(job.run)[0]["nodes"] == ["n2"]
        newest = max(before, default=0)
        assert f"from step {newest};" in job.output or moment is in_save, (newest, job.output)
        assert compare_rows(job.rows(), undisturbed, engines=2) == []
        assert len(job.rows()) == STEPS + 1
    finally:
        three.start_node("n2")
        three.wait(lambda: three.states() == {"idle"}, 120)


def hold(slurm: Slurm, job: Job, moment: Callable[[Path, int], bool]) -> None:
    """Stop the ranks and the sampler in this moment, from step 3 on."""
    for _ in range(20):
        slurm.wait(lambda: moment(job.run, 3), 300)
        signal_ranks(slurm, signal.SIGSTOP)
        if moment(job.run, 3):
            return
        signal_ranks(slurm, signal.SIGCONT)
    raise AssertionError("the moment was missed each time")


def signal_ranks(slurm: Slurm, number: signal.Signals) -> None:
    for process in slurm.processes():
        if {"rpg_megatron.training.rank", "rpg_megatron.rollout.sampler"} & set(process.info["cmdline"]):
            os.kill(process.pid, number)


@pytest.mark.long
def test_a_users_error_is_not_requeued(three: Slurm, tmp_path: Path) -> None:
    """A reward that begins to fail in step 2."""
    (tmp_path / "fails_later.py").write_text(
        "import pathlib\ncalls = pathlib.Path(__file__).with_suffix('.calls')\n"
        "def reward(response, answer):\n"
        "    with calls.open('a') as f:\n        f.write('x')\n"
        "    if calls.stat().st_size > 40:\n        raise KeyError('meta')\n"
        "    return True\n"
    )
    job = Job(
        three,
        tmp_path,
        "train_multi_node",
        str(QUICKSTART),
        *RUN,
        "reward={type: 'fails_later:reward'}",
        PYTHONPATH=str(tmp_path),
    )
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), job.logs()
    assert "KeyError: 'meta'" in job.output
    assert "requeued" not in job.output

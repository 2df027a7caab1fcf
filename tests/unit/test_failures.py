"""Which failures are the machine's, which nodes are suspect, and how often a job is started again.

Why: a machine's failure that is taken for the user's ends a run of two weeks at night; a user's error that is
taken for the machine's burns three more starts of all GPUs. The logs are ends of real ones: NCCL's watchdog,
gloo, CUDA, Python. Not covered: Slurm (test_slurm_failures.py).
"""

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from rpg_megatron.config import load_settings
from rpg_megatron.config.cluster import JobSettings
from rpg_megatron.launcher.environment import ENVIRONMENT, ends_of_starts, record_end
from rpg_megatron.launcher.failures import (
    RESTART_FILE,
    Failure,
    judge,
    judge_engine,
    note_failure,
    request_restart,
)
from rpg_megatron.launcher.run_dir import create_run

WATCHDOG = (
    "[rank1]:[E1127 23:01:02.12 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught "
    "collective operation timeout: "
    "WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
GLOO = (
    "Traceback (most recent call last):\n"
    '  File "loop.py", line 3, in step\n'
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3\n"
)
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be\n"
BUG = "Traceback (most recent call last):\nKeyError: 'meta'\n"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\n"
EARLIER = "warning: Connection reset by peer, tried again\nTraceback (most recent):\nValueError: shape\n"


@dataclass
class Dead:
    """A process that has ended."""

    name: str
    code: int
    log: Path
    host: str = "here"
    opened: IO[bytes] | None = field(default=None)
    log_start: int = 0

    def exit_code(self) -> int | None:
        return self.code


@pytest.fixture
def dead(tmp_path: Path):
    def make(name: str, code: int, text: str, host: str = "here") -> Dead:
        log = tmp_path / f"{name}.log"
        log.write_text("step 3\n" + text)
        return Dead(name, code, log, host)

    return make


@pytest.mark.parametrize(
    ("ends", "machine", "nodes"),
    [
        ([("rank_1", -signal.SIGABRT, WATCHDOG, "n2")], True, ()),  # all ranks report it: nobody is suspect
        ([("rank_0", 1, GLOO, "")], True, ()),
        ([("rank_1", -signal.SIGKILL, "", "n2")], True, ("n2",)),
        ([("rank_1", -signal.SIGKILL, "", "n2"), ("rank_0", 1, GLOO, "")], True, ("n2",)),
        ([("rank_3", 1, ECC, "n2"), ("rank_0", 1, GLOO, "")], True, ("n2",)),
        ([("rank_0", -signal.SIGBUS, "", "here")], True, ("here",)),
        ([("rank_0", 1, BUG, "")], False, ()),
        ([("rank_0", 1, GLOO, ""), ("rank_1", 1, BUG, "n2")], False, ()),  # the bug broke the connection
        ([("rank_0", 1, MEMORY, "")], False, ()),  # it would not fit elsewhere either
        ([("rank_0", 1, EARLIER, "")], False, ()),  # an older line is not what it died of
        ([("sampler", 0, "", "")], False, ()),
    ],
)
def test_whose_failure(dead, ends: list, machine: bool, nodes: tuple[str, ...]) -> None:
    failure = judge([dead(*end) for end in ends])
    assert (failure.machine, failure.nodes) == (machine, nodes)
    assert "\n" not in failure.cause + failure.error


def test_what_an_earlier_start_wrote_does_not_count(dead) -> None:
    process = dead("rank_0", 1, ECC)
    assert judge([process]).machine
    process.log_start = process.log.stat().st_size
    process.log.write_text(process.log.read_text() + BUG)
    assert judge([process]) == Failure(
        "rank_0 ended with exit code 1: KeyError: 'meta'", error="rank_0: KeyError: 'meta'"
    )


def test_the_first_error_is_the_programs(dead) -> None:
    failure = judge([dead("rank_0", 1, GLOO), dead("rank_1 on node 1 (n2)", 1, BUG, "n2")])
    assert failure.error == "rank_1 on node 1 (n2): KeyError: 'meta'"
    assert failure.cause == "rank_1 on node 1 (n2) ended with exit code 1: KeyError: 'meta'"


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("(EngineCore pid=77) " + ECC, True),
        ("OSError: [Errno 116] Stale file handle\n", True),
        (MEMORY, False),
        ("ValueError: unsupported architecture\n", False),
        ("", False),
    ],
)
def test_an_engine_that_cannot_be_used(dead, text: str, machine: bool) -> None:
    failure = judge_engine("engine 3 died", dead("engine_3", 0, text, "n4"))
    assert (failure.machine, failure.nodes) == (machine, ("n4",) if machine else ())
    assert failure.cause.startswith("engine 3 died")


def ended(step: int, *nodes: str) -> dict[str, Any]:
    return {"failure": True, "step": step, "nodes": list(nodes)}


def test_restarts_are_counted_since_the_last_checkpoint(tmp_path: Path) -> None:
    file, job = tmp_path / "restart", JobSettings(max_restarts=2)

    def asked(*ends: dict[str, Any], step: int = 4) -> str | None:
        file.unlink(missing_ok=True)
        note = request_restart(file, ends, step, job)
        assert note
        return file.read_text() if file.exists() else None

    assert asked(ended(4, "n2")) == "120 n2\n"
    assert asked(ended(4, "n7"), {}, ended(4, "n2")) == "120 n2\n"  # another end between them
    assert asked(ended(2), ended(2), ended(2), ended(4)) == "120 \n"  # it has made progress
    assert asked(ended(4, "n2"), ended(4, "n5", "n2")) == "240 n2,n5\n"
    assert asked(ended(4), ended(4), ended(4)) is None
    job = JobSettings(max_restarts=99)
    assert asked(*[ended(4)] * 6) == "3600 \n"
    job = JobSettings(max_restarts=0)
    assert asked(ended(4)) is None


def test_runs_without_a_checkpoint_count_together(config_file, tmp_path, monkeypatch) -> None:
    """Such a run is not resumed: each start has a folder of its own."""
    monkeypatch.setenv(RESTART_FILE, str(tmp_path / "restart"))
    settings = load_settings(config_file, [f"runs={tmp_path / 'runs'}", "job.max_restarts=2"])
    failure, notes = Failure("node 1 (n2) is lost", machine=True, nodes=("n2",)), []
    for _ in range(3):
        folder = create_run(settings)
        (folder / ENVIRONMENT).write_text('[{"started": "now"}]')
        record_end(folder, failure.cause, 0, failure.nodes)
        notes.append(note_failure(settings, failure, 0))
    assert notes[0] == "restart 1 of 2 in 120 s, without n2"
    assert notes[1] == "restart 2 of 2 in 240 s, without n2"
    assert notes[2].startswith("not started again: it has failed 3 times")
    # Before a run's folder is open, its newest run records the failure; a preempted start is none.
    folder = create_run(settings)
    starts = [{"started": "a", "end": {"reason": "SIGUSR1", "step": 0}}, {"started": "b"}]
    (folder / ENVIRONMENT).write_text(json.dumps(starts))
    assert note_failure(settings, failure) == "restart 1 of 2 in 120 s, without n2"
    assert ends_of_starts(folder)[1]["nodes"] == ["n2"]


def test_only_a_machines_failure_in_a_job_is_restarted(config_file, tmp_path, monkeypatch) -> None:
    settings, file = load_settings(config_file, [f"runs={tmp_path / 'runs'}"]), tmp_path / "restart"
    monkeypatch.delenv(RESTART_FILE, raising=False)
    assert note_failure(settings, Failure("x", machine=True)) == ""
    monkeypatch.setenv(RESTART_FILE, str(file))
    assert note_failure(settings, Failure("x")) == ""
    assert not file.exists()
    monkeypatch.setenv(RESTART_FILE, str(tmp_path / "absent" / "restart"))
    assert "cannot be written" in note_failure(settings, Failure("x", machine=True))


def test_ends_are_recorded(tmp_path: Path) -> None:
    record_end(tmp_path, "no starts yet", 0, None)
    assert not (tmp_path / ENVIRONMENT).exists()
    (tmp_path / ENVIRONMENT).write_text(
        json.dumps([{"started": "a", "end": {"reason": "x"}}, {"started": "b"}])
    )
    record_end(tmp_path, "node 1 (n2) is lost", 6, ["n2"])
    assert ends_of_starts(tmp_path) == [
        {"reason": "x"},
        {"reason": "node 1 (n2) is lost", "step": 6, "failure": True, "nodes": ["n2"]},
    ]
    for damaged in ("[1, null]", "{", '{"a": 1}', '[{"end": 3}]'):
        (tmp_path / ENVIRONMENT).write_text(damaged)
        record_end(tmp_path, "y", 0, None)
        assert all(isinstance(end, dict) for end in ends_of_starts(tmp_path))

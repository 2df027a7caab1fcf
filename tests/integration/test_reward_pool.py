"""Worker processes that verify answers and are killed when they take too long.

Why: a verifier that hangs, crashes or uses too much memory must cost one answer and one deadline, never the
run; and no process may stay behind, however the run ends. Not covered: which answers are hard
(test_reward_pool_hostile).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.config import UserError
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.rewards.pool import WorkerPool, start_function
from rpg_megatron.rewards.reward import Response, Scorer
from rpg_megatron.system.forked_workers import Outcome
from tests.support.commands import read_proc_file, read_stats
from tests.support.launcher import wait_for

ODD = """
import os, subprocess, time

def reward(response, answer):
    print("noise")
    if response == "hang":
        subprocess.Popen(["sleep", "1000"])
        while True:
            pass
    if response == "grows":
        subprocess.Popen(["sleep", "1000"])
        return len(b"x" * (300 << 20)) > 0
    if response == "crash":
        os.abort()
    if response == "held":  # as long as nobody kills the worker; then it is graded again
        try:
            open(answer, "x").write(str(os.getpid()))
        except FileExistsError:
            return True
        time.sleep(1000)
    if response == "exit":
        raise SystemExit(3)
    if response == "memory":
        return len([0] * (1 << 34))
    if response == "raise":
        raise KeyError("no such key")
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "ends a child":
        child = subprocess.Popen(["sleep", "1000"])
        child.terminate()
        return child.wait() == -15
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "runs a program":  # as rewards do that run the code of a response
        program = "for n in 3 4 5 6 7 8 9; do echo '[' >&$n && exit 5; done 2>/dev/null; exit 7"
        return subprocess.run(["bash", "-c", program], close_fds=False).returncode == 7
    if response == "half":
        return 0.5
    if response == "minus":
        return -2
    return response == answer

constant = 3
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_reward.py").write_text(ODD)
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    (tmp_path / "fatal_reward.py").write_text("import os; os.abort()\n")
    (tmp_path / "leaving_reward.py").write_text("raise SystemExit(5)\n")
    monkeypatch.chdir(tmp_path)
    return "odd_reward:reward"


@pytest.fixture
def start(odd: str) -> Iterator[Callable[..., WorkerPool]]:
    pools = []

    def make(**changes: object) -> WorkerPool:
        limits = {"workers": 2, "deadline": 3.0} | changes
        server = start_function(odd, limits["deadline"], 1 << 31)
        pools.append(WorkerPool(server, limits["workers"]))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def children(mark: str) -> list[int]:
    """Living processes of the pools that were started with this text in their environment."""
    pids = []
    for pid in read_stats():
        command, environment = read_proc_file(pid, "cmdline"), read_proc_file(pid, "environ")
        in_pool = b"system.fork_server" in command or command.startswith(b"sleep\x001000")
        if in_pool and f"={mark}\0".encode() in environment:
            pids.append(pid)
    return pids


def sleeps(pid: int) -> bool:
    """Whether the process, which may end meanwhile, is the command sleep."""
    return read_proc_file(pid, "cmdline").startswith(b"sleep")


def test_every_input_gets_an_outcome(start: Callable[..., WorkerPool]) -> None:
    pool = start()
    inputs = ["hang", "crash", "exit", "memory", "raise", "nan", "text", "half", "minus", "a", "b"]
    inputs += ["interrupt"]
    outcomes = {a: pool.submit([a, "a"]) for a in inputs}
    results = {a: future.result(timeout=300) for a, future in outcomes.items()}
    assert {a: r.failure for a, r in results.items()} == {
        "hang": "timeout",
        "crash": "crash",
        "exit": "error",
        "memory": "memory",
        "raise": "error",
        "nan": "error",
        "text": "error",
        "half": None,
        "minus": None,
        "a": None,
        "b": None,
        "interrupt": "error",
    }
    assert [results[a].value for a in inputs[7:-1]] == [0.5, -2.0, True, False]
    assert "no such key" in results["raise"].detail
    assert pool.pop_counts() == {"timeout": 1, "crash": 1, "memory": 1, "error": 5}
    assert pool.pop_counts() == {"timeout": 0, "crash": 0, "memory": 0, "error": 0}


def test_memory_is_counted_beyond_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function whose imports need more than the limit works, and a call that takes too much does not."""
    (tmp_path / "large_reward.py").write_text(
        "import mmap\nkept = mmap.mmap(-1, 600 << 20)\n"
        "def take(mib, _):\n    return len(bytearray(int(mib) << 20)) > 0\n"
    )
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool(start_function("large_reward:take", 60.0, 512 << 20), 1)
    try:
        assert pool.submit(["300", ""]).result(timeout=300) == Outcome(True)
        assert pool.submit(["600", ""]).result(timeout=300).failure == "memory"
    finally:
        pool.close()


def test_programs_of_a_function_have_none_of_its_connections(start: Callable[..., WorkerPool]) -> None:
    """With one they would answer for it: a reward that the program itself chooses."""
    assert start(workers=1).submit(["runs a program", ""]).result(timeout=300) == Outcome(True)


def test_it_works_on_after_each_kind_of_death(start: Callable[..., WorkerPool]) -> None:
    pool = start(workers=1)
    for death in ("crash", "hang", "memory", "crash", "crash"):
        assert pool.submit([death, "a"]).result(timeout=300).failure
        assert pool.submit(["a", "a"]).result(timeout=300).value is True


def kill_while_it_grades(file: Path) -> None:
    """Kill the worker that is held, and writes its number to this file."""
    wait_for(lambda: file.exists() and file.read_text())
    os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_worker_killed_from_outside_costs_no_answer(
    start: Callable[..., WorkerPool], tmp_path: Path
) -> None:
    """As when the machine runs out of memory: idle, or while it grades. It is not the function's fault."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPG_TEST_POOL", mark)
        pool = start(workers=1, deadline=1000.0)
    assert pool.submit(["a", "a"]).result(timeout=300).value is True
    os.kill(max(children(mark)), signal.SIGKILL)
    assert pool.submit(["a", "a"]).result(timeout=300) == Outcome(True)
    grading = pool.submit(["held", str(tmp_path / "held")])
    kill_while_it_grades(tmp_path / "held")
    assert grading.result(timeout=300) == Outcome(True)
    assert pool.pop_counts()["crash"] == 0


def test_large_inputs_pass(start: Callable[..., WorkerPool]) -> None:
    pool = start()
    large = "\ud800\x00é" * 1_000_000  # half a surrogate pair too
    assert pool.submit([large, large]).result(timeout=300).value is True


def test_nothing_is_left_when_it_is_closed(
    start: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("RPG_TEST_POOL", mark)
    pool = start(deadline=1000.0)
    running = pool.submit(["hang", "a"])
    waiting = [pool.submit(["hang", "a"]) for _ in range(3)]
    wait_for(lambda: any(sleeps(pid) for pid in children(mark)))
    pool.close()
    assert all(f.result(timeout=60).failure == "crash" for f in [running, *waiting])
    wait_for(lambda: children(mark) == [])


def test_a_worker_that_is_replaced_leaves_nothing(
    start: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("RPG_TEST_POOL", mark)
    pool = start(workers=1, deadline=300.0)
    assert pool.submit(["grows", "a"]).result(timeout=300).value is True
    assert pool.submit(["a", "a"]).result(timeout=300).value is True  # of another worker
    assert not [pid for pid in children(mark) if sleeps(pid)]


def test_a_fork_of_the_process_leaves_the_workers_alone(start: Callable[..., WorkerPool]) -> None:
    pool = start(workers=1)
    assert pool.submit(["a", "a"]).result(timeout=300).value is True
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.submit(["a", "a"]).result(timeout=300).value is True
    assert pool.pop_counts()["crash"] == 0


def test_nothing_outlives_a_killed_parent(odd: str) -> None:
    """Kill -9, with one worker that hangs and one that is idle. Processes that a worker started remain."""
    code = (
        "from rpg_megatron.rewards.pool import WorkerPool, start_function\n"
        f"pool = WorkerPool(start_function({odd!r}, 1000.0, 1 << 31), 2)\n"
        "pool.submit(['a', 'a']).result(); pool.submit(['b', 'a']).result()\n"
        "pool.submit(['hang', 'a']); print('up', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | {"RPG_TEST_POOL": mark}
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    wait_for(lambda: len(children(mark)) >= 3)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def gone() -> bool:
        remaining = children(mark)
        for pid in remaining:  # the pool does not end processes that the function started
            if sleeps(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not remaining

    wait_for(gone)


def test_the_input_of_a_killed_worker_is_graded_again(
    start: Callable[..., WorkerPool], tmp_path: Path
) -> None:
    """The kernel kills what needs most memory, whatever it works on: that must not make an answer wrong."""
    pool = start(deadline=1000.0)
    files = [tmp_path / str(number) for number in range(4)]
    answers = [pool.submit(["held", str(file)]) for file in files]
    for file in files:
        kill_while_it_grades(file)
    assert [answer.result(timeout=300).value for answer in answers] == [True] * 4
    assert pool.pop_counts()["crash"] == 0


def test_a_killed_fork_server_is_started_again(
    start: Callable[..., WorkerPool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = start(workers=1)
    assert pool.submit(["a", "a"]).result(timeout=300).value is True
    assert pool._server._process is not None
    pool._server._process[0].kill()  # its worker dies with it
    pool._server._process[0].wait()
    assert pool.submit(["a", "a"]).result(timeout=300).value is True
    assert "restarting it" in caplog.text


def test_a_schedulers_warning_leaves_the_fork_server(
    start: Callable[..., WorkerPool], caplog: pytest.LogCaptureFixture
) -> None:
    """It reaches all processes of a job, while the run finishes its step; rewards can still end children."""
    pool = start(workers=1)
    assert pool._server._process is not None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(pool._server._process[0].pid, number)
    assert pool.submit(["ends a child", ""]).result(timeout=300).value is True
    assert "restarting it" not in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("odd_reward:no_such", "has no 'no_such'"),
        ("odd_reward:constant", "is a int, not a function"),
        ("broken_reward:reward", "importing broken_reward fails: ZeroDivisionError"),
        ("fatal_reward:reward", "ended the process (exit code -6)"),
        ("leaving_reward:reward", "exit code 5"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_message(odd: str, name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        Scorer(RewardSettings(type=name), max_tokens=10)
    assert str(error.value).startswith("reward.type: ")
    assert says in str(error.value)


def test_a_function_of_the_users_own_scores(odd: str) -> None:
    scorer = Scorer(RewardSettings(type=odd, correct=2.0, wrong=-3.0, deadline=3.0), max_tokens=10)
    try:
        texts = ["a", "b", "half", "minus", "hang", "raise", "Answer: 5"]
        responses = [Response(text, np.zeros(1, np.int32), "stop") for text in texts]
        scores = asyncio.run(scorer.score(responses, "a"))
        counts = scorer.pop_counts()
    finally:
        scorer.close()
    assert [(s.reward, s.correct) for s in scores] == [
        (2.0, True),
        (-3.0, False),
        (0.5, True),
        (-2.0, False),
        (-3.0, False),  # killed: wrong, not lost
        (-3.0, False),
        (-3.0, False),
    ]
    assert scores[-1].extracted == "5"
    assert "timeout" in scores[4].reason
    expected = {"reward/timeouts": 1, "reward/crashes": 0, "reward/out_of_memory": 0, "reward/errors": 1}
    assert counts == expected
    assert [bool(score.failures) for score in scores] == [False] * 4 + [True, True, False]
    assert json.dumps(counts)

"""Ranks that are forks of one process: exit codes, logs, signals, and who ends with whom.

Why: the launcher is not their parent, and a failed rank that it took for a finished one would lose a run
silently. Proved with real processes. Not covered: what a run does with them (every test of a run with several
ranks on a CPU).
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpg_megatron.system import process_groups
from rpg_megatron.system.child import Child, start_child
from rpg_megatron.system.forked_ranks import STATUS, ForkedRank
from tests.support.launcher import wait_for

RANKS, EARLIER = 4, "of an earlier start\n"
PARENT = """
import os, signal, sys
from pathlib import Path
from rpg_megatron.system.forked_ranks import fork_ranks
logs, status = map(Path, sys.argv[1:])
rank = fork_ranks(logs, 4, status)
"""


type Start = Callable[..., tuple[Child, list[ForkedRank]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a parent, which runs ``before``, of ranks, which run ``code`` with ``rank`` their number."""
    parents: list[Child] = []
    status = tmp_path / STATUS
    (tmp_path / "rank_1.log").write_text(EARLIER)

    def start(code: str, before: str = "") -> tuple[Child, list[ForkedRank]]:
        command = [sys.executable, "-P", "-c", before + PARENT + code, str(tmp_path), str(status)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        parents.append(start_child("ranks", command, environment, tmp_path / "ranks.log"))
        wait_for(status.exists, 60)
        return parents[-1], [ForkedRank(rank, tmp_path, status, parents[-1]) for rank in range(RANKS)]

    yield start
    for parent in parents:
        parent.kill()
        parent.reap()


def codes(ranks: list[ForkedRank]) -> list[int | None]:
    return [rank.exit_code() for rank in ranks]


SLEEP = "signal.pause()"


COMPUTE = """
import numpy, pyarrow, pyarrow.parquet, torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{status}.rendezvous", rank=rank, world_size=4)
a = torch.ones(600, 600, requires_grad=True)
(a @ a).relu().sum().backward()
dist.all_reduce(a.grad)
b = numpy.ones((600, 600))
table = pyarrow.table({"a": list(range(100_000))})
pyarrow.parquet.write_table(table, f"{logs}/{rank}.parquet")
print(torch.get_num_threads(), a.grad[0, 0].item(), (b @ b).sum(),
      pyarrow.parquet.read_table(f"{logs}/{rank}.parquet").num_rows, flush=True)
"""


def test_libraries_with_threads_work_in_ranks(start: Start, tmp_path, monkeypatch) -> None:
    """The parent has threads of them, which forks do not have."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = (
        "from rpg_megatron.policy.device import start_device\n"
        "start_device('cpu')\n"
        "import os, rpg_megatron.training.loop\n"
        "print(len(os.listdir('/proc/self/task')), flush=True)\n"
    )
    _, ranks = start(COMPUTE, before)
    wait_for(lambda: None not in codes(ranks), 120, lambda: str([rank.log.read_text() for rank in ranks]))
    assert codes(ranks) == [0] * RANKS, [rank.log.read_text() for rank in ranks]
    expected = f"3 {RANKS * 2 * 600.0} {600.0**3} 100000"
    assert [rank.log.read_text().splitlines()[-1] for rank in ranks] == [expected] * RANKS
    assert int((tmp_path / "ranks.log").read_text().splitlines()[-1]) > 1


def test_each_rank_has_a_code_and_a_log(start: Start) -> None:
    parent, ranks = start(
        "print('I am', rank, flush=True)\n"
        "if rank == 1: sys.exit('error: one')\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 3: os._exit(75)"
    )
    wait_for(lambda: None not in codes(ranks), 60)
    assert codes(ranks) == [0, 1, -signal.SIGKILL, 75]
    assert [(rank.name, rank.log_start) for rank in ranks] == [
        ("rank_0", 0),
        ("rank_1", len(EARLIER)),
        ("rank_2", 0),
        ("rank_3", 0),
    ]
    assert [rank.log.read_text() for rank in ranks] == [
        "I am 0\n",
        EARLIER + "I am 1\nerror: one\n",
        "I am 2\n",
        "I am 3\n",
    ]
    wait_for(lambda: parent.exit_code() is not None, 60)
    assert parent.exit_code() == 0
    assert codes(ranks) == [0, 1, -signal.SIGKILL, 75]


def test_a_rank_that_has_ended_keeps_its_pid_while_others_run(start: Start) -> None:
    """Otherwise a signal of the launcher could reach another process."""
    _, ranks = start(f"rank or sys.exit(3)\n{SLEEP}")
    wait_for(lambda: ranks[0].exit_code() is not None, 60)
    assert codes(ranks) == [3, None, None, None]
    assert Path(f"/proc/{ranks[0].pid}").exists()
    ranks[0].warn()


def test_a_warning_ends_ranks_and_not_their_parent(start: Start) -> None:
    """Schedulers send it to every process; what ranks have not set otherwise ends them."""
    parent, ranks = start(
        f"if rank: signal.signal(signal.SIGTERM, lambda *_: os._exit(70 + rank))\nprint('ready')\n{SLEEP}"
    )
    wait_for(lambda: all("ready" in rank.log.read_text() for rank in ranks), 60)
    parent.warn()
    for rank in ranks[1:]:
        rank.warn()
    wait_for(lambda: None not in codes(ranks[1:]), 60)
    assert codes(ranks) == [None, 71, 72, 73]
    assert parent.exit_code() is None
    ranks[0].warn()
    wait_for(lambda: ranks[0].exit_code() is not None, 60)
    assert ranks[0].exit_code() == -signal.SIGTERM


def test_ranks_die_with_their_parent(start: Start) -> None:
    parent, ranks = start(SLEEP)
    assert codes(ranks) == [None] * RANKS
    wait_for(lambda: all(process_groups.members(rank.pid) == [rank.pid] for rank in ranks), 60)
    os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: not any(process_groups.start_time(rank.pid) for rank in ranks), 60)
    assert codes(ranks) == [-signal.SIGKILL] * RANKS
    ranks[0].warn()


def test_ending_the_parent_ends_what_ranks_have_started(start: Start) -> None:
    parent, ranks = start(
        "import subprocess\nprint(subprocess.Popen(['sleep', '600'], process_group=0).pid)\n" + SLEEP
    )
    wait_for(lambda: all("\n" in rank.log.read_text()[rank.log_start :] for rank in ranks), 60)
    started = [int(rank.log.read_text()[rank.log_start :]) for rank in ranks]
    assert all(process_groups.start_time(pid) for pid in started)
    parent.kill()
    assert not any(process_groups.start_time(pid) for pid in [*started, *(rank.pid for rank in ranks)])


def test_a_lost_file_is_no_exit_code(start: Start, tmp_path: Path) -> None:
    parent, ranks = start(SLEEP)
    (tmp_path / STATUS).write_text("[[")
    assert codes(ranks) == [None] * RANKS
    (tmp_path / STATUS).unlink()
    assert codes(ranks) == [None] * RANKS
    parent.kill()
    assert codes(ranks) == [-signal.SIGKILL] * RANKS

"""Two launchers are one run: what ends one ends the other, the cause is named, nothing stays behind.

Why: a job that has lost a node and does not know it occupies all the others until its time limit. Both
whole launchers run here, on one machine and without Slurm, with stand-ins for engines, sampler and ranks; the
second launcher's engine is reached over TCP. Not covered: real engines, sampler and ranks, Slurm
(tests/integration/test_slurm.py), a network between the two.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from rpg_megatron.engine.restarts import ask_restart
from rpg_megatron.launcher.bandwidth import MEASURE
from rpg_megatron.launcher.environment import ends_of_starts
from rpg_megatron.launcher.failures import RESTART_FILE
from tests.support.launcher import LIMIT, wait_for
from tests.support.launcher_pair import DRIVER, WELL

pytestmark = pytest.mark.usefixtures("forked_starts")


def test_a_run_that_ends_well_ends_everywhere(pair) -> None:
    nodes = pair(rank_0=WELL, rank_1=WELL)
    nodes.begin("cluster.min_bandwidth=1")
    assert sorted(nodes.acted()) == ["engine_0", "engine_1", "rank_0", "rank_1", "sampler"]
    wait_for(lambda: "engine 1 is up" in nodes.out(0), message=nodes.logs)
    nodes.go()
    assert nodes.finish() == [0, 0], nodes.logs()
    assert (nodes.err(0), nodes.err(1)) == ("", "")
    note = f"note: {MEASURE}\n"
    assert (nodes.out(0).count(note), nodes.out(1).count(note)) == (1, 0)


def test_colocated_ranks_start_beside_engines_which_are_put_to_sleep(pair) -> None:
    """Ranks that build themselves while engines start may need more memory than a GPU has: they wait
    (tests/unit/test_start_side_by_side.py) until the launcher says that all engines sleep.
    """
    nodes = pair(rank_0=WELL, rank_1=WELL)
    nodes.begin("engine.colocated=true", acts=7)
    assert "network" not in nodes.out(0)  # by cluster.min_bandwidth=0
    started, asleep = ["engine_0", "engine_1", "rank_0", "rank_1", "sampler"], ["sleep_0", "sleep_1"]
    assert sorted(nodes.acted()) == started + asleep
    nodes.go()
    assert nodes.finish() == [0, 0], nodes.logs()
    assert "engines sleep; the trainer ranks build the model" in nodes.out(0)


def test_an_engine_that_does_not_sleep_ends_the_run(pair, tmp_path: Path) -> None:
    nodes = pair()
    (tmp_path / "refuses").touch()
    for rank in range(nodes.count):  # ranks may be ended before they act
        nodes.start(rank, "engine.colocated=true")
    assert nodes.finish() == [1, 1], nodes.logs()
    assert nodes.err(0).startswith("error: engine 0 did not go to sleep: /sleep answered 500")
    assert "ranks build" not in nodes.out(0)


def test_a_rank_that_dies_on_the_other_node_is_named(pair) -> None:
    # rank 0 fails first, as when its peer closes the connection; rank 1 was killed, which is the reason.
    nodes = pair(
        rank_0="sys.exit('connection closed by peer')",
        rank_1="until(lambda: gone('rank_0')); print('last words', flush=True); os.kill(os.getpid(), 9)",
    )
    nodes.begin()
    nodes.go()
    assert nodes.finish() == [1, 1], nodes.logs()
    assert nodes.err(0).startswith("error: rank_1 on node 1 (")
    assert "was killed (SIGKILL" in nodes.err(0)
    assert "last words" in nodes.err(0)
    assert nodes.err(1).startswith("error: stopped by node 0: rank_1 on node 1")
    assert nodes.err(1).count("\n") == 1
    (log,) = nodes.folder.glob("runs/*/logs/launcher_1.log")
    assert "rank_1 was killed (SIGKILL" in log.read_text()
    assert "the run has ended: rank_1 on node 1" in log.read_text()


def test_a_user_error_of_a_rank_there_is_one_message_here(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTART_FILE, str(tmp_path / "restart"))
    nodes = pair(rank_1="print('error: the tokenizer is broken; mend it', flush=True); os._exit(2)")
    nodes.begin()
    nodes.go()
    assert nodes.finish() == [2, 1], nodes.logs()
    assert nodes.err(0) == "error: the tokenizer is broken; mend it\n"
    assert list((tmp_path / "runs").iterdir()) == []
    assert not (tmp_path / "restart").exists()


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_node_ends_the_run(pair, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTART_FILE, str(tmp_path / "restart"))  # as in a job
    nodes = pair()
    nodes.begin(*(["cluster.silence=4"] if how == "silent" else []))
    nodes.launchers[1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    assert nodes.launchers[0].wait(LIMIT) == 1
    why = "its launcher has exited" if how == "killed" else "it was silent for 4 s (cluster.silence)"
    assert nodes.err(0).startswith("error: node 1 (")
    assert f"is lost: {why}" in nodes.err(0)
    host = socket.gethostname()
    assert nodes.err(0).endswith(f"\nrestart 1 of 3 in 120 s, without {host}\n")
    assert (tmp_path / "restart").read_text() == f"120 {host}\n"
    (run,) = (tmp_path / "runs").glob("tiny-*")
    (end,) = ends_of_starts(run)
    assert end["reason"].startswith("node 1 (")
    assert (end["failure"], end["nodes"], end["step"]) == (True, [host], 0)
    nodes.launchers[1].send_signal(signal.SIGCONT)
    nodes.finish()


def test_the_death_of_the_first_launcher_ends_the_others(pair) -> None:
    nodes = pair()
    nodes.begin()
    nodes.launchers[0].kill()
    assert nodes.launchers[1].wait(LIMIT) == 1
    assert nodes.err(1) == "error: node 0, which leads the run, is lost: its launcher has exited\n"
    nodes.finish()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_ctrl_c_on_any_node_stops_all(pair, rank: int) -> None:
    nodes = pair()
    nodes.begin()
    nodes.launchers[rank].send_signal(signal.SIGINT)
    assert nodes.finish() == [130, 1], nodes.logs()
    assert nodes.err(0).startswith("stopped: Ctrl-C")
    assert nodes.err(1).startswith("error: stopped by node 0: Ctrl-C")


@pytest.mark.parametrize("warned", [pytest.param((0, 1), marks=pytest.mark.long), (1,)])
def test_a_warning_to_any_node_has_all_ranks_save(pair, warned: tuple[int, ...]) -> None:
    """The first launcher has the exit code that requeues the job; the other one exits with 0."""
    saves = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); (here / name).touch()"
    nodes = pair(rank_0=saves, rank_1=saves)
    nodes.begin()
    nodes.go()
    wait_for(lambda: all((nodes.folder / f"rank_{rank}").exists() for rank in (0, 1)), message=nodes.logs)
    for rank in warned:
        nodes.launchers[rank].send_signal(signal.SIGUSR1)
    assert nodes.finish() == [75, 0], nodes.logs()
    assert nodes.err(0).startswith("stopped: SIGUSR1")
    assert nodes.err(1) == ""


def test_an_engine_on_the_other_node_is_restarted_there(pair) -> None:
    nodes = pair(engine_1="(here / 'go').unlink(); os._exit(0)")
    nodes.begin()
    wait_for(lambda: "engine 1 is up" in nodes.out(0), message=nodes.logs)
    nodes.go()
    wait_for(lambda: nodes.acted().count("engine_1") == 2, message=nodes.logs)
    assert "warning: engine 1 died; restart 1 of 3" in nodes.out(0)
    wait_for(lambda: nodes.out(0).count("engine 1 is up") == 2, message=nodes.logs)
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert nodes.finish() == [130, 1]


def test_an_engine_that_hangs_on_the_other_node_is_ended_there(pair) -> None:
    """The sampler, a stand-in here, reports it; a stopped process reacts to SIGKILL only."""
    nodes = pair(engine_1="(here / 'go').unlink(); os.kill(os.getpid(), signal.SIGSTOP)")
    nodes.begin()
    wait_for(lambda: "engine 1 is up" in nodes.out(0), message=nodes.logs)
    work = next(f for f in nodes.folders() if (f / "engines.json").exists())
    nodes.go()
    wait_for(lambda: not (nodes.folder / "go").exists(), message=nodes.logs)
    ask_restart(work, 1, 0, "engine 1 hangs")
    wait_for(lambda: nodes.acted().count("engine_1") == 2, message=nodes.logs)
    assert "warning: engine 1 hangs; restart 1 of 3" in nodes.out(0)
    wait_for(lambda: nodes.out(0).count("engine 1 is up") == 2, message=nodes.logs)
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert nodes.finish() == [130, 1]


@pytest.mark.parametrize("dies", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_engine_on_two_other_nodes_is_restarted_as_one(pair, dies: int) -> None:
    """Its server is on node 1, workers alone on node 2; where one of the two ends, both are started again."""
    names = {1: "engine_0", 2: "engine_0_part_1"}
    nodes = pair(**{names[dies]: "(here / 'go').unlink(); os._exit(0)"})
    nodes.count = 3
    nodes.begin(
        "parallel.data=1",
        "engine={replicas: 1, tensor: 4}",
        "cluster={interface: lo, join_timeout: 300, min_bandwidth: 0, trainer_nodes: 1, engine_nodes: 2}",
        acts=4,
    )
    assert sorted(nodes.acted()) == ["engine_0", "engine_0_part_1", "rank_0", "sampler"]
    wait_for(lambda: "engine 0 is up" in nodes.out(0), message=nodes.logs)
    first, second = sorted((nodes.folder / "spans").read_text().splitlines())
    assert first.startswith(
        "--nnodes 2 --node-rank 0 --distributed-executor-backend mp --master-addr 127.0.0.1"
    )
    assert second == first.replace("--node-rank 0", "--node-rank 1") + " --headless"
    nodes.go()
    wait_for(lambda: all(nodes.acted().count(name) == 2 for name in names.values()), message=nodes.logs)
    assert f"warning: engine 0 died; it failed on node {dies} (" in nodes.out(0)
    assert re.search(rf"restart 1 of 3; log: .*/{names[dies]}\.log\n", nodes.out(0))
    wait_for(lambda: nodes.out(0).count("engine 0 is up") == 2, message=nodes.logs)
    assert len(set((nodes.folder / "spans").read_text().splitlines())) == 2  # the same place
    (log,) = nodes.folder.glob("runs/*/logs/engine_0_part_1.log")
    assert "; restart 1 of 3 ----" in log.read_text()
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert nodes.finish() == [130, 1, 1]


def test_a_colocated_engine_restarts_after_the_ranks_turn(pair) -> None:
    nodes = pair(engine_1="(here / 'go').unlink(); os._exit(0)")
    nodes.begin("engine.colocated=true", acts=7)
    wait_for(lambda: "the trainer ranks build the model" in nodes.out(0), message=nodes.logs)
    (turn,) = [file for folder in nodes.folders() for file in folder.glob("trainers-turn")]
    nodes.go()
    wait_for(lambda: "warning: engine 1 died; restart 1 of 3" in nodes.out(0), message=nodes.logs)
    time.sleep(2.0)
    assert nodes.acted().count("engine_1") == 1
    turn.unlink()
    wait_for(lambda: nodes.acted().count("engine_1") == 2, message=nodes.logs)
    wait_for(lambda: nodes.out(0).count("engine 1 is up") == 2, message=nodes.logs)
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert nodes.finish() == [130, 1]


def test_nodes_with_other_settings_are_refused(pair) -> None:
    nodes = pair()
    nodes.start(0)
    nodes.start(1, "optimizer.lr=0.5")
    assert nodes.finish() == [2, 1], nodes.logs()
    assert "was started with other settings: optimizer.lr is 0.5 there and 1e-06 here" in nodes.err(0)


def test_what_is_wrong_on_the_other_node_is_said_on_the_first(pair, tmp_path: Path) -> None:
    nodes = pair()
    (tmp_path / "driver_1.py").write_text(
        DRIVER.replace(
            "cli.main()",
            "from rpg_megatron.config import UserError\n"
            "def check(run): raise UserError('no GPU is visible; mend it')\n"
            "follower.check_start = check\ncli.main()",
        )
    )
    nodes.start(0)
    (tmp_path / "driver.py").unlink()
    (tmp_path / "driver_1.py").rename(tmp_path / "driver.py")
    nodes.start(1)
    assert nodes.finish() == [2, 2], nodes.logs()
    assert nodes.err(0).endswith("): no GPU is visible; mend it\n")
    assert nodes.err(1) == "error: no GPU is visible; mend it\n"


def test_a_node_that_does_not_come_is_named(pair) -> None:
    nodes = pair()
    nodes.start(0, "cluster.join_timeout=2")
    assert nodes.finish() == [1]
    assert nodes.err(0).startswith("error: node 1 did not join within 2 s (cluster.join_timeout)")


def test_a_node_that_fails_after_the_state_is_saved_changes_nothing(pair, tmp_path: Path) -> None:
    """The sampler, which keeps the groups of the unfinished step, is all that is waited for."""
    saves = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); (here / name).touch()"
    keeps = """
def keep(*_, warnings=[]):
    warnings.append(1)
    (here / f"warning_{len(warnings)}").touch()
signal.signal(signal.SIGTERM, keep)
(here / name).touch()
until((here / "kept").exists)
os._exit(0)"""
    nodes = pair(rank_0=saves, rank_1=saves, sampler=keeps)
    fails = """
receive = follower.NodeAgent.receive
def fail(agent):
    if agent._spec.rank and os.path.exists(os.path.join(os.path.dirname(__file__), "break")):
        raise OSError("the disk broke")
    return receive(agent)
follower.NodeAgent.receive = fail
launcher.list_steps = lambda folder: {1: folder / "step_1"}
cli.main()"""
    (tmp_path / "driver.py").write_text(DRIVER.replace("cli.main()", fails))
    nodes.begin()
    nodes.go()
    names = ("rank_0", "rank_1", "sampler")
    wait_for(lambda: all((tmp_path / name).exists() for name in names), message=nodes.logs)
    nodes.launchers[0].send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "warning_2").exists, message=nodes.logs)  # the first launcher waits for the sampler
    (tmp_path / "break").touch()
    nodes.launchers[1].wait(LIMIT)
    (tmp_path / "kept").touch()
    assert nodes.finish() == [75, 1], nodes.logs()
    assert nodes.err(0).startswith("stopped: SIGUSR1; rerun the same command to resume")

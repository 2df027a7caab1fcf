"""Two launchers are one run: what ends one ends the other, the cause is named, nothing stays behind.

Why: a job that has lost a node and does not know it occupies all the others until its time limit. Both
whole launchers run here, on one machine and without Slurm, with stand-ins for engines, sampler and ranks; the
second launcher's engine is asked over TCP. Not covered: real engines, sampler and ranks, Slurm
(tests/integration/test_slurm.py), a network between the two.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg_megatron.engine.restarts import ask_restart
from tests.support.launcher import wait_for
from tests.support.launcher_pair import DRIVER, Pair


@pytest.fixture
def pair(tmp_path: Path, config_file: Path) -> Iterator:
    made: list[Pair] = []

    def make(**plan: str) -> Pair:
        made.append(Pair(tmp_path, config_file, **plan))
        return made[-1]

    yield make
    for one in made:
        for launcher in one.launchers:
            launcher.kill()
            launcher.wait()
        wait_for(lambda one=one: not one.living(), 20, one.logs)


WELL = "import sys; open(sys.argv[1] + '/summary.json', 'w').write('{}'); os._exit(0)"


def test_a_run_that_ends_well_ends_everywhere(pair) -> None:
    one = pair(rank_0=WELL, rank_1=WELL)
    one.begin()
    assert sorted(one.acted()) == ["engine_0", "engine_1", "rank_0", "rank_1", "sampler"]
    wait_for(lambda: "engine 1 is up" in one.out(0), 30, one.logs)
    one.go()
    assert one.finish() == [0, 0], one.logs()
    assert (one.err(0), one.err(1)) == ("", "")


def test_colocated_ranks_start_when_all_engines_sleep(pair) -> None:
    """Engines and ranks that build themselves at the same time may need more memory than a GPU has."""
    one = pair(rank_0=WELL, rank_1=WELL)
    one.begin("engine.colocated=true", acts=7)
    assert sorted(one.acted()[:3]) == ["engine_0", "engine_1", "sampler"]
    assert sorted(one.acted()[3:5]) == ["sleep_0", "sleep_1"]
    assert sorted(one.acted()[5:]) == ["rank_0", "rank_1"]
    one.go()
    assert one.finish() == [0, 0], one.logs()


def test_an_engine_that_does_not_sleep_ends_the_run(pair, tmp_path: Path) -> None:
    one = pair()
    (tmp_path / "refuses").touch()
    one.begin("engine.colocated=true", acts=5)
    assert one.finish() == [1, 1], one.logs()
    assert one.err(0).startswith("error: engine 0 did not go to sleep: /sleep answered 500")
    assert not any(name.startswith("rank") for name in one.acted())


def test_a_rank_that_dies_on_the_other_node_ends_both_and_is_named(pair) -> None:
    # rank 0 falls over first, as it does when its partner hangs up; rank 1 was killed, which explains it.
    one = pair(
        rank_0="sys.exit('connection closed by peer')",
        rank_1="time.sleep(0.3); print('last words', flush=True); os.kill(os.getpid(), 9)",
    )
    one.begin()
    one.go()
    assert one.finish() == [1, 1], one.logs()
    assert one.err(0).startswith("error: rank_1 on node 1 (")
    assert "was killed (SIGKILL" in one.err(0)
    assert "last words" in one.err(0)
    assert one.err(1).startswith("error: stopped by node 0: rank_1 on node 1")
    assert one.err(1).count("\n") == 1


def test_a_user_error_of_a_rank_there_is_one_message_here(pair, tmp_path: Path) -> None:
    one = pair(rank_1="print('error: the tokenizer is broken; mend it', flush=True); os._exit(2)")
    one.begin()
    one.go()
    assert one.finish() == [2, 1], one.logs()
    assert one.err(0) == "error: the tokenizer is broken; mend it\n"
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_node_ends_the_run(pair, how: str) -> None:
    one = pair()
    one.begin("cluster.silence=4")
    one.launchers[1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    assert one.launchers[0].wait(60) == 1
    why = "its launcher has exited" if how == "killed" else "it was silent for 4 s (cluster.silence)"
    assert one.err(0).startswith("error: node 1 (")
    assert f"is lost: {why}" in one.err(0)
    one.launchers[1].send_signal(signal.SIGCONT)
    one.finish()


def test_the_death_of_the_first_launcher_ends_the_others(pair) -> None:
    one = pair()
    one.begin()
    one.launchers[0].kill()
    assert one.launchers[1].wait(60) == 1
    assert one.err(1) == "error: node 0, which leads the run, is lost: its launcher has exited\n"
    one.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_on_any_node_stops_all(pair, rank: int) -> None:
    one = pair()
    one.begin()
    one.launchers[rank].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1], one.logs()
    assert one.err(0).startswith("stopped: Ctrl-C")
    assert one.err(1).startswith("error: stopped by node 0: Ctrl-C")


@pytest.mark.parametrize("warned", [(0, 1), (1,)])
def test_a_warning_to_any_node_has_all_ranks_save(pair, warned: tuple[int, ...]) -> None:
    """The exit code that has the job requeued is the first launcher's; the other leaves in peace."""
    saves = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); (here / name).touch()"
    one = pair(rank_0=saves, rank_1=saves)
    one.begin()
    one.go()
    wait_for(lambda: all((one.folder / f"rank_{rank}").exists() for rank in (0, 1)), 30, one.logs)
    for rank in warned:
        one.launchers[rank].send_signal(signal.SIGUSR1)
    assert one.finish() == [75, 0], one.logs()
    assert one.err(0).startswith("stopped: SIGUSR1")
    assert one.err(1) == ""


def test_an_engine_on_the_other_node_is_restarted_there(pair) -> None:
    one = pair(engine_1="(here / 'go').unlink(); os._exit(0)")
    one.begin()
    wait_for(lambda: "engine 1 is up" in one.out(0), 30, one.logs)
    one.go()
    wait_for(lambda: one.acted().count("engine_1") == 2, 30, one.logs)
    assert "warning: engine 1 died; restart 1 of 3" in one.out(0)
    wait_for(lambda: one.out(0).count("engine 1 is up") == 2, 30, one.logs)
    one.launchers[0].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1]


def test_an_engine_that_hangs_on_the_other_node_is_ended_there(pair) -> None:
    """The sampler, a stand-in here, reports it; a stopped process is deaf to anything but SIGKILL."""
    one = pair(engine_1="(here / 'go').unlink(); os.kill(os.getpid(), signal.SIGSTOP)")
    one.begin()
    wait_for(lambda: "engine 1 is up" in one.out(0), 30, one.logs)
    work = next(f for f in one.folders() if (f / "engines.json").exists())
    one.go()
    wait_for(lambda: not (one.folder / "go").exists(), 30, one.logs)
    ask_restart(work, 1, 0, "engine 1 hangs")
    wait_for(lambda: one.acted().count("engine_1") == 2, 30, one.logs)
    assert "warning: engine 1 hangs; restart 1 of 3" in one.out(0)
    wait_for(lambda: one.out(0).count("engine 1 is up") == 2, 30, one.logs)
    one.launchers[0].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1]


def test_a_colocated_engine_is_restarted_when_the_ranks_have_left_its_gpu(pair) -> None:
    dies = "time.sleep(0.5); (here / 'go').unlink(missing_ok=True); os._exit(0)"
    one = pair(engine_1=dies)
    one.begin("engine.colocated=true", acts=7)
    (turn,) = [file for folder in one.folders() for file in folder.glob("trainers-turn")]
    one.go()
    wait_for(lambda: "warning: engine 1 died; restart 1 of 3" in one.out(0), 30, one.logs)
    time.sleep(2.0)
    assert one.acted().count("engine_1") == 1
    turn.unlink()
    wait_for(lambda: one.acted().count("engine_1") == 2, 30, one.logs)
    wait_for(lambda: one.out(0).count("engine 1 is up") == 2, 30, one.logs)
    one.launchers[0].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1]


def test_nodes_with_other_settings_are_refused(pair) -> None:
    one = pair()
    one.start(0)
    one.start(1, "optimizer.lr=0.5")
    assert one.finish() == [2, 1], one.logs()
    assert "was started with other settings: optimizer.lr is 0.5 there and 1e-06 here" in one.err(0)


def test_what_is_wrong_on_the_other_node_is_said_on_the_first(pair, tmp_path: Path) -> None:
    one = pair()
    (tmp_path / "driver_1.py").write_text(
        DRIVER.replace(
            "cli.main()",
            "from rpg_megatron.config import UserError\n"
            "def check(run): raise UserError('no GPU is visible; mend it')\n"
            "follower.check_start = check\ncli.main()",
        )
    )
    one.start(0)
    (tmp_path / "driver.py").unlink()
    (tmp_path / "driver_1.py").rename(tmp_path / "driver.py")
    one.start(1)
    assert one.finish() == [2, 2], one.logs()
    assert one.err(0).endswith("): no GPU is visible; mend it\n")
    assert one.err(1) == "error: no GPU is visible; mend it\n"


def test_a_node_that_does_not_come_is_named(pair) -> None:
    one = pair()
    one.start(0, "cluster.join_timeout=2")
    assert one.finish() == [2]
    assert one.err(0).startswith("error: node 1 did not join within 2 s (cluster.join_timeout)")

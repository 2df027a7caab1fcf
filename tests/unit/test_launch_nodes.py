"""Two launchers are one run: what ends one ends the other, the cause is named, nothing stays behind.

Why: a job that has lost a node and does not know it holds all the others until its walltime is over. Both
whole launchers run here, on one machine and without Slurm, with stand-ins for engines, sampler and ranks; the
second launcher's engine is asked over TCP. Not covered: real engines, sampler and ranks, Slurm
(tests/integration/test_slurm.py), a network between the two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg_megatron.system import process_groups

# Every stand-in has a child that ignores SIGTERM, as a worker in the middle of a step does.
STAND_IN = """
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
def act(name):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    pids = [os.getpid(), subprocess.Popen([sys.executable, "-c", code]).pid]
    with open(here / "pids", "a") as f:
        f.write(" ".join(map(str, pids)) + "\\n")
    with open(here / "acted", "a") as f:
        f.write(name + "\\n")
    plan = json.loads((here / "plan.json").read_text()).get(name, "")
    while not (here / "go").exists():
        time.sleep(0.05)
    exec(plan)
    time.sleep(600)
"""

ENGINE = """
import http.server, os, socket, socketserver, sys, threading
import stand_in
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["RPG_ENGINE_TOKEN"]
        self.send_response(200 if right else 401)
        self.end_headers()
    def do_POST(self):
        with open(stand_in.here / "acted", "a") as f:
            f.write(f"{self.path.split('?')[0][1:]}_{sys.argv[1]}\\n")
        self.send_response(500 if (stand_in.here / "refuses").exists() else 200)
        self.end_headers()
    def address_string(self):
        return "somebody"
where = sys.argv[2:]
if len(where) == 1:
    server = socketserver.UnixStreamServer(where[0], Handler)
else:
    socketserver.TCPServer.allow_reuse_address = True
    server = socketserver.TCPServer((where[0], int(where[1])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
stand_in.act("engine_" + sys.argv[1])
"""

DRIVER = """
import os, sys
from rpg_megatron import cli
from rpg_megatron.launcher import node_agent as follower
from rpg_megatron.launcher import run as launcher
from rpg_megatron.engine import process as engine

def command(settings, index, socket, *, weights="dummy", listen=None):
    where = [listen[0], str(listen[1])] if listen else [str(socket)]
    return [sys.executable, os.path.join(os.path.dirname(__file__), "stand_in_engine.py"), str(index), *where]

engine.engine_command = command
launcher.SAMPLER, launcher.RANK, follower.RANK = "stand_in_sampler", "stand_in_rank", "stand_in_rank"
launcher.GRACE = follower.GRACE = 1.0
cli.main()
"""

OVERRIDES = [
    "parallel.data=2",
    "engine.replicas=2",
    "bridge.transport=process_group",
    "cluster={interface: lo, join_timeout: 60}",
]


class Pair:
    """Two launchers, and stand-ins that follow a plan when they are told to go."""

    def __init__(self, folder: Path, config: Path, **plan: str):
        self.folder, self.config = folder, config
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "stand_in_engine.py").write_text(ENGINE)
        (folder / "stand_in_sampler.py").write_text("import stand_in; stand_in.act('sampler')")
        (folder / "stand_in_rank.py").write_text(
            "import os, stand_in; stand_in.act('rank_' + os.environ['RANK'])"
        )
        (folder / "driver.py").write_text(DRIVER)
        (folder / "plan.json").write_text(json.dumps(plan))
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *overrides: str) -> subprocess.Popen[str]:
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        place = ["--nodes", "2", "--node-rank", str(rank), "--job", "x"]
        command = [sys.executable, str(self.folder / "driver.py"), "train", str(self.config)]
        self.launchers.append(
            subprocess.Popen(
                [*command, *OVERRIDES, *overrides, *place],
                stdout=(self.folder / f"out-{rank}").open("w"),
                stderr=(self.folder / f"err-{rank}").open("w"),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": "/tmp"},
                text=True,
                cwd=self.folder,
            )
        )
        return self.launchers[-1]

    def begin(self, *overrides: str, acts: int = 5) -> None:
        """Start both and wait until all that shall run does."""
        for rank in (0, 1):
            self.start(rank, *overrides)
        wait_for(lambda: len(self.acted()) == acts, 60, self.told)

    def go(self) -> None:
        (self.folder / "go").touch()

    def acted(self) -> list[str]:
        """In the order of time."""
        file = self.folder / "acted"
        return file.read_text().split() if file.exists() else []

    def living(self) -> list[int]:
        file = self.folder / "pids"
        pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
        return [pid for pid in pids if process_groups.start_time(pid) is not None]

    def out(self, rank: int) -> str:
        return (self.folder / f"out-{rank}").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"err-{rank}").read_text()

    def told(self) -> str:
        logs = self.folder.glob("runs/*/logs/*")
        texts = [self.out(0), self.err(0), self.out(1), self.err(1), *(log.read_text() for log in logs)]
        return "\n---\n".join(texts)

    def folders(self) -> list[Path]:
        """Private folders of these launchers."""
        mine = {launcher.pid for launcher in self.launchers}
        owners = [*Path("/tmp").glob("rpg-*/owner.json"), *Path("/dev/shm").glob("rpg-*/owner.json")]
        return [owner.parent for owner in owners if json.loads(owner.read_text())["pid"] in mine]

    def finish(self) -> list[int]:
        """Exit codes, by rank; nothing must be left."""
        codes = [launcher.wait(60) for launcher in self.launchers]
        wait_for(lambda: not self.living() and not self.folders(), 20, self.told)
        assert list(self.folder.glob("runs/.meeting*")) == []
        return codes


def wait_for(condition, seconds: float, told) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


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
        wait_for(lambda one=one: not one.living(), 20, one.told)


WELL = "os._exit(0)"


def test_a_run_that_ends_well_ends_everywhere(pair) -> None:
    one = pair(rank_0=WELL, rank_1=WELL)
    one.begin()
    assert sorted(one.acted()) == ["engine_0", "engine_1", "rank_0", "rank_1", "sampler"]
    wait_for(lambda: "engine 1 is up" in one.out(0), 30, one.told)
    one.go()
    assert one.finish() == [0, 0], one.told()
    assert (one.err(0), one.err(1)) == ("", "")


def test_colocated_ranks_start_when_all_engines_sleep(pair) -> None:
    """Engines and ranks that build themselves at the same time may need more memory than a GPU has."""
    one = pair(rank_0=WELL, rank_1=WELL)
    one.begin("engine.colocated=true", acts=7)
    assert sorted(one.acted()[:3]) == ["engine_0", "engine_1", "sampler"]
    assert one.acted()[3:5] == ["sleep_0", "sleep_1"]
    assert sorted(one.acted()[5:]) == ["rank_0", "rank_1"]
    one.go()
    assert one.finish() == [0, 0], one.told()


def test_an_engine_that_does_not_sleep_ends_the_run(pair, tmp_path: Path) -> None:
    one = pair()
    (tmp_path / "refuses").touch()
    one.begin("engine.colocated=true", acts=4)
    assert one.finish() == [1, 1], one.told()
    assert one.err(0).startswith("error: engine 0 did not go to sleep: it answered 500")
    assert not any(name.startswith("rank") for name in one.acted())


def test_a_rank_that_dies_on_the_other_node_ends_both_and_is_named(pair) -> None:
    # rank 0 falls over first, as it does when its partner hangs up; rank 1 was killed, which explains it.
    one = pair(
        rank_0="sys.exit('connection closed by peer')",
        rank_1="time.sleep(0.3); print('last words', flush=True); os.kill(os.getpid(), 9)",
    )
    one.begin()
    one.go()
    assert one.finish() == [1, 1], one.told()
    assert one.err(0).startswith("error: rank_1 on node 1 (")
    assert "was killed (SIGKILL" in one.err(0)
    assert "last words" in one.err(0)
    assert one.err(1).startswith("error: ended by node 0: rank_1 on node 1")
    assert one.err(1).count("\n") == 1


def test_a_user_error_of_a_rank_there_is_one_message_here(pair, tmp_path: Path) -> None:
    one = pair(rank_1="print('error: the tokenizer is broken; mend it', flush=True); os._exit(2)")
    one.begin()
    one.go()
    assert one.finish() == [2, 1], one.told()
    assert one.err(0) == "error: the tokenizer is broken; mend it\n"
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_node_ends_the_run(pair, how: str) -> None:
    one = pair()
    one.begin("cluster.silence=4")
    one.launchers[1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    assert one.launchers[0].wait(60) == 1
    why = "its launcher is gone" if how == "killed" else "it was silent for 4 s (cluster.silence)"
    assert one.err(0).startswith("error: node 1 (")
    assert f"is lost: {why}" in one.err(0)
    one.launchers[1].send_signal(signal.SIGCONT)
    one.finish()


def test_the_death_of_the_first_launcher_ends_the_others(pair) -> None:
    one = pair()
    one.begin()
    one.launchers[0].kill()
    assert one.launchers[1].wait(60) == 1
    assert one.err(1) == "error: node 0, which leads the run, is lost: its launcher is gone\n"
    one.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_on_any_node_stops_all(pair, rank: int) -> None:
    one = pair()
    one.begin()
    one.launchers[rank].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1], one.told()
    assert one.err(0).startswith("stopped: Ctrl-C")
    assert one.err(1).startswith("error: ended by node 0: Ctrl-C")


@pytest.mark.parametrize("warned", [(0, 1), (1,)])
def test_a_warning_to_any_node_has_all_ranks_save(pair, warned: tuple[int, ...]) -> None:
    """The exit code that has the job requeued is the first launcher's; the other leaves in peace."""
    saves = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); (here / name).touch()"
    one = pair(rank_0=saves, rank_1=saves)
    one.begin()
    one.go()
    wait_for(lambda: all((one.folder / f"rank_{rank}").exists() for rank in (0, 1)), 30, one.told)
    for rank in warned:
        one.launchers[rank].send_signal(signal.SIGUSR1)
    assert one.finish() == [75, 0], one.told()
    assert one.err(0).startswith("stopped: SIGUSR1")
    assert one.err(1) == ""


def test_an_engine_on_the_other_node_is_restarted_there(pair) -> None:
    one = pair(engine_1="(here / 'go').unlink(); os._exit(0)")
    one.begin()
    wait_for(lambda: "engine 1 is up" in one.out(0), 30, one.told)
    one.go()
    wait_for(lambda: one.acted().count("engine_1") == 2, 30, one.told)
    assert "warning: engine 1 died; restart 1 of 3" in one.out(0)
    wait_for(lambda: one.out(0).count("engine 1 is up") == 2, 30, one.told)
    one.launchers[0].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1]


def test_a_colocated_engine_is_restarted_when_the_ranks_have_left_its_gpu(pair) -> None:
    dies = "time.sleep(0.5); (here / 'go').unlink(missing_ok=True); os._exit(0)"
    one = pair(engine_1=dies)
    one.begin("engine.colocated=true", acts=7)
    (turn,) = [file for folder in one.folders() for file in folder.glob("trainers-turn")]
    one.go()
    wait_for(lambda: "warning: engine 1 died; restart 1 of 3" in one.out(0), 30, one.told)
    time.sleep(2.0)
    assert one.acted().count("engine_1") == 1
    turn.unlink()
    wait_for(lambda: one.acted().count("engine_1") == 2, 30, one.told)
    wait_for(lambda: one.out(0).count("engine 1 is up") == 2, 30, one.told)
    one.launchers[0].send_signal(signal.SIGINT)
    assert one.finish() == [130, 1]


def test_nodes_with_other_settings_are_refused(pair) -> None:
    one = pair()
    one.start(0)
    one.start(1, "optimizer.lr=0.5")
    assert one.finish() == [2, 1], one.told()
    assert "was started with other settings: optimizer.lr is 0.5 there and 1e-06 here" in one.err(0)


def test_what_is_wrong_on_the_other_node_is_said_on_the_first(pair, tmp_path: Path) -> None:
    one = pair()
    (tmp_path / "driver_1.py").write_text(
        DRIVER.replace(
            "cli.main()",
            "from rpg_megatron.config import UserError\n"
            "def check(settings, share): raise UserError('no GPU is visible; mend it')\n"
            "follower.check = check\ncli.main()",
        )
    )
    one.start(0)
    (tmp_path / "driver.py").unlink()
    (tmp_path / "driver_1.py").rename(tmp_path / "driver.py")
    one.start(1)
    assert one.finish() == [2, 2], one.told()
    assert one.err(0).endswith("): no GPU is visible; mend it\n")
    assert one.err(1) == "error: no GPU is visible; mend it\n"


def test_a_node_that_does_not_come_is_named(pair) -> None:
    one = pair()
    one.start(0, "cluster.join_timeout=2")
    assert one.finish() == [2]
    assert one.err(0).startswith("error: node 1 did not come within 2 s (cluster.join_timeout)")

"""An engine's process starts, answers, stops and leaves nothing, with a stand-in for vLLM's server.

Why: an engine that is gone, stuck, deaf to SIGTERM or orphaned must neither hang a run nor outlive it.
Not covered: its command line (tests/unit/test_engine_command.py), vLLM itself (test_rollout_engine).
"""

import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.engine import process as module
from rpg_megatron.engine.process import EngineProcess, engine_socket
from rpg_megatron.launcher.engines import Engines
from tests.support.commands import read_proc_file, read_stats
from tests.support.engine import wait_healthy
from tests.support.launcher import LIMIT, single_node, wait_for

SERVER = """
import http.server, os, socketserver, subprocess, sys, time, signal
mode, path = sys.argv[1:3]
print("starting in mode", mode, flush=True)
if mode == "broken":
    print("RuntimeError: no such weights", flush=True)
    sys.exit(0)  # as vLLM does
if mode == "leaves":
    import mmap
    name = f"/dev/shm/psm_test_{os.getpid()}"
    with open(name, "w+b") as f:
        f.truncate(4096)
        mapped = mmap.mmap(f.fileno(), 4096)
    print("made", name, flush=True)
    while not os.path.exists(os.path.join(os.path.dirname(path), "noted")):
        time.sleep(0.02)
    os._exit(0)  # all of its processes end, and nothing maps the file any more
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "stuck":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["RPG_ENGINE_TOKEN"]
        self.send_response(200 if right else 401)
        self.end_headers()
    def address_string(self):
        return "unix"
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return load_settings(config_file, [f"engine.start_timeout={LIMIT}"])


def make(settings: Settings, folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    path = engine_socket(folder, 2)
    command = [sys.executable, "-c", SERVER, mode, str(path)]
    monkeypatch.setattr(module, "engine_command", lambda *_, **__: command)
    return EngineProcess(settings, 2, socket=path, log=folder / "e.log", bridge_dir=folder, token="secret")


def members(group: int) -> list[int]:
    return [pid for pid, stat in read_stats().items() if int(stat[2]) == group]


# -- life ----------------------------------------------------------------------------------------------------


def test_starts_answers_and_stops(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    assert not engine.alive()
    assert engine.pid is None
    engine.stop()  # nothing to do
    for _ in range(2):  # and once more after a stop
        engine.start()
        wait_healthy(engine, LIMIT)
        assert engine.alive()
        assert engine.healthy()
        assert [f.stat().st_mode & 0o777 for f in (engine.log, engine.socket)] == [0o600, 0o700]
        group = engine.pid
        assert group is not None
        assert len(members(group)) == 2
        assert os.getsid(group) == group != os.getsid(0)
        with pytest.raises(RuntimeError, match="runs already"):
            engine.start()
        engine.stop()
        assert not members(group)
        assert not engine.socket.exists()
        assert not engine.alive()
        assert not engine.healthy()


def error_of_start(settings: Settings, folder: Path, begun: str = "") -> str:
    """The message of a run whose first engine does not start; no process of it is left.

    begun: what its log has before anybody looks whether it has started.
    """
    shown: Any = SimpleNamespace(status=lambda _: None)
    with single_node(settings, folder) as (cluster, agent):
        engines = Engines(settings, folder, cluster, shown, restarts=0)
        engines.start()
        group = agent._engines[0].pid
        assert group is not None

        def watch() -> None:
            wait_for(lambda: begun in (folder / "logs" / "engine_0.log").read_text())
            while not engines.all_up:
                cluster.pump()
                engines.check(lambda: False)
                if agent._engines[0].segments:
                    (folder / "noted").touch()
                time.sleep(0.05)

        with pytest.raises(UserError) as error:
            watch()
        assert not members(group)
    return str(error.value)


def test_an_option_that_vllm_refuses_is_one_line(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import argparse; argparse.ArgumentParser('api_server.py', usage='a page').parse_args(['--x=1'])"
    monkeypatch.setattr(module, "engine_command", lambda *_, **__: [sys.executable, "-c", code])
    expected = "engine 0: vLLM refuses engine.arguments: unrecognized arguments: --x=1; correct them"
    assert error_of_start(settings, tmp_path) == expected


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("broken", r"ended while starting: RuntimeError: no such weights"),
        ("stuck", r"did not answer within 2 s \(engine.start_timeout\)"),
    ],
)
def test_broken_and_stuck_engines_say_why(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, problem: str
) -> None:
    settings = load_settings(config_file, [f"engine.start_timeout={2 if mode == 'stuck' else LIMIT}"])
    make(settings, tmp_path, mode, monkeypatch)
    begun = f"starting in mode {mode}"
    message = error_of_start(settings, tmp_path, begun)
    assert re.match(rf"engine 0 {problem}; the end of .*engine_0\.log", message), message
    assert begun in message


def test_shared_memory_of_a_failed_start_is_removed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of vLLM's workers are removed; those of other processes, whatever their names, are not."""
    with tempfile.NamedTemporaryFile(prefix="psm_", dir="/dev/shm") as foreign:
        foreign.truncate(4096)
        with mmap.mmap(foreign.fileno(), 4096):
            make(settings, tmp_path, "leaves", monkeypatch)
            assert error_of_start(settings, tmp_path).startswith("engine 0 ended while starting")
        assert Path(foreign.name).exists()
    file = (tmp_path / "logs" / "engine_0.log").read_text().split("made ")[1].split()[0]
    assert not Path(file).exists()


def test_wrong_token_is_a_bug_of_ours(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.start()
    try:
        wait_healthy(engine, LIMIT)
        engine._token = "wrong"
        with pytest.raises(RuntimeError, match="rejected the token"):
            engine.healthy()
    finally:
        engine.stop()


@pytest.mark.parametrize("mode", ["good", "deaf"])
def test_no_process_survives_a_stop_or_a_kill(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine = make(settings, tmp_path, mode, monkeypatch)
    engine.start()
    wait_healthy(engine, LIMIT)
    group = engine.pid
    assert group is not None
    if mode == "good":
        os.kill(group, signal.SIGKILL)
        wait_for(lambda: not engine.alive())
        assert members(group)  # its child is still there
    engine.stop(grace=0.3)
    wait_for(lambda: not members(group))
    assert not engine.socket.exists()


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, config_file: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from rpg_megatron.config import load_settings
from rpg_megatron.engine import process as module
module.engine_command = lambda *_, **__: [sys.executable, "-c", "import time; time.sleep(600)"]
settings = load_settings(Path({str(config_file)!r}))
folder = Path({str(tmp_path)!r})
places = {{"socket": folder / "e.sock", "log": folder / "e.log", "bridge_dir": folder}}
engine = module.EngineProcess(settings, 0, token="t", **places)
engine.start()
print(engine.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        wait_for(lambda: any(b"sleep" in read_proc_file(p, "cmdline") for p in members(group)))
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not members(group))


def test_a_socket_path_that_is_too_long(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.socket = tmp_path / ("x" * 120)
    with pytest.raises(UserError, match=r"longer than 107 bytes; set TMPDIR to a shorter one"):
        engine.start()
    assert engine.pid is None


@pytest.mark.parametrize(("part", "seconds"), [(None, 20.0), (0, 20.0), (1, 1.0)])
def test_a_part_without_a_server_gets_no_time_for_requests(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int | None, seconds: float
) -> None:
    """Of itself vLLM waits 5 s for workers, which do not hear it, and 4 s more."""
    engine = make(settings, tmp_path, "deaf", monkeypatch)
    if part is not None:
        engine.span(2, part, ("127.0.0.1", 1))
    engine.start()
    wait_healthy(engine, 20)
    engine.note_answer()
    clock = [0.0]

    def sleep(duration: float) -> None:
        clock[0] += duration

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    engine.stop(grace=20.0)
    assert seconds <= clock[0] < seconds + 0.2

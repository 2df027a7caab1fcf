"""An engine's process starts, answers, stops and leaves nothing, with a stand-in for vLLM's server.

Why: an engine that is gone, stuck, deaf to SIGTERM or orphaned must neither hang a run nor outlive it.
Not covered: its command line (tests/unit/test_engine_command.py), vLLM itself (test_rollout_engine).
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.engine import process as module
from rpg_megatron.engine.process import EngineProcess, engine_socket
from tests.support.commands import read_proc_file, read_stats

SERVER = """
import http.server, os, socketserver, subprocess, sys, time, signal
mode, path = sys.argv[1:]
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
    time.sleep(1.5)
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
    return load_settings(config_file, ["engine.start_timeout=20"])


def make(settings: Settings, folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    path = engine_socket(folder, 2)
    command = [sys.executable, "-c", SERVER, mode, str(path)]
    monkeypatch.setattr(module, "engine_command", lambda *_, **__: command)
    return EngineProcess(settings, 2, socket=path, log=folder / "e.log", bridge_dir=folder, token="secret")


def members(group: int) -> list[int]:
    return [pid for pid, stat in read_stats().items() if int(stat[2]) == group]


def wait_for(condition, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


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
        assert engine.wait_healthy() < 20
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


def test_an_option_that_vllm_refuses_is_one_line(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import argparse; argparse.ArgumentParser('api_server.py', usage='a page').parse_args(['--x=1'])"
    monkeypatch.setattr(module, "engine_command", lambda *_, **__: [sys.executable, "-c", code])
    path = engine_socket(tmp_path, 2)
    engine = EngineProcess(
        settings, 2, socket=path, log=tmp_path / "e.log", bridge_dir=tmp_path, token="secret"
    )
    engine.start()
    with pytest.raises(UserError) as error:
        engine.wait_healthy()
    expected = "engine 2: vLLM refuses engine.arguments: unrecognized arguments: --x=1; correct them"
    assert str(error.value) == expected


def test_broken_and_stuck_engines_say_why(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "broken", monkeypatch)
    engine.start()
    with pytest.raises(
        UserError, match=r"ended while starting: RuntimeError: no such weights; the end of .*e\.log"
    ) as error:
        engine.wait_healthy()
    assert str(error.value).startswith("engine 2 ")
    assert "starting in mode broken" in str(error.value)

    engine = make(settings, tmp_path, "stuck", monkeypatch)
    engine.start()
    group = engine.pid
    assert group is not None
    assert wait_for(lambda: len(members(group)) == 2)
    with pytest.raises(UserError, match="did not answer within 1 s") as error:
        engine.wait_healthy(timeout=1.0)
    assert "starting in mode stuck" in str(error.value)
    assert not members(group)


def test_shared_memory_of_a_failed_start_is_removed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of vLLM's workers are removed; those of other processes, whatever their names, are not."""
    with tempfile.NamedTemporaryFile(prefix="psm_", dir="/dev/shm") as foreign:
        foreign.truncate(4096)
        with mmap.mmap(foreign.fileno(), 4096):
            engine = make(settings, tmp_path, "leaves", monkeypatch)
            engine.start()
            with pytest.raises(UserError, match="ended while starting"):
                engine.wait_healthy()
        assert Path(foreign.name).exists()
    file = (tmp_path / "e.log").read_text().split("made ")[1].split()[0]
    assert not Path(file).exists()


def test_wrong_token_is_a_bug_of_ours(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.start()
    try:
        engine.wait_healthy()
        engine._token = "wrong"
        with pytest.raises(RuntimeError, match="refuses our token"):
            engine.healthy()
    finally:
        engine.stop()


@pytest.mark.parametrize("mode", ["good", "deaf"])
def test_no_process_survives_a_stop_or_a_kill(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine = make(settings, tmp_path, mode, monkeypatch)
    engine.start()
    engine.wait_healthy()
    group = engine.pid
    assert group is not None
    if mode == "good":
        os.kill(group, signal.SIGKILL)
        assert wait_for(lambda: not engine.alive())
        assert members(group)  # its child is still there
    engine.stop(grace=0.3)
    assert wait_for(lambda: not members(group), 2.0)
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
        assert wait_for(lambda: any(b"sleep" in read_proc_file(p, "cmdline") for p in members(group)))
        time.sleep(0.3)
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_for(lambda: not members(group))


def test_socket_paths_that_cannot_be_used(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.socket.write_text("")
    with pytest.raises(UserError, match="is no socket; move it"):
        engine.start()
    engine.socket.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(engine.socket))
    with pytest.raises(UserError, match="left by a dead process; delete it"):
        engine.start()
    listener.listen()
    with pytest.raises(UserError, match="another process listens on"):
        engine.start()
    listener.close()
    engine.socket = tmp_path / ("x" * 120)
    with pytest.raises(UserError, match="longer than 107 bytes"):
        engine.start()
    assert engine.pid is None

"""A launcher probes, puts to sleep and ends all of its engines at the same time.

Why: a scheduler's warning leaves seconds to stop colocated engines, and a run may have hundreds. Stand-ins
answer, or end, only when all of them have been asked: with one request after the other none would. Not
covered: the real engine (test_rollout_engine.py), engines on two nodes (test_launcher_nodes.py).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.engine.process import EngineProcess
from rpg_megatron.engine.restarts import is_trainers_turn
from rpg_megatron.launcher import engines as module
from rpg_megatron.launcher import node_agent
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.node_agent import NodeAgent, NodeEndpoint
from rpg_megatron.launcher.nodes import assign_node
from rpg_megatron.launcher.supervisor import StopSignals, Supervisor
from rpg_megatron.system.process_groups import members
from tests.support.launcher import wait_for

ENDS_WITH_THE_OTHERS = """
cd "$1"
trap 'echo > asked-$2; : < gate; echo > left-$2; exit' TERM
echo > up-$2
sleep 600 &
wait
"""
QUIET: Any = SimpleNamespace(status=lambda text: None, adopt=lambda engine: None, guard_shared_memory=len)
"""Stands in for the progress display and the supervisor."""


class Listening(EngineProcess):
    """An engine that runs already; the test answers for it."""

    def start(self) -> None:
        pass

    def alive(self) -> bool:
        return True


def build(kind: type[EngineProcess], settings: Settings, folder: Path, count: int) -> list[EngineProcess]:
    places: Any = {"log": folder / "log", "bridge_dir": folder, "token": "secret"}
    return [kind(settings, i, socket=folder / f"{i}.sock", **places) for i in range(count)]


@contextmanager
def answering(engines: list[EngineProcess]) -> Iterator[list[bytes]]:
    """Answer the engines' requests as soon as there are as many as engines; yields their first lines."""
    request_lines: list[bytes] = []
    ended = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            for engine in engines:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(engine.socket))
                listener.listen()
                selector.register(listener, selectors.EVENT_READ)
            listening.set()
            open_: list[socket.socket] = []
            while not ended.is_set():
                for key, _ in selector.select(0.05):
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    request_lines.append(connection.recv(4096).partition(b"\r\n")[0])
                    open_.append(connection)
                if len(open_) == len(engines):
                    for connection in open_:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                        connection.close()
                    open_.clear()

    listening = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert listening.wait(60)
    yield request_lines
    ended.set()
    thread.join()


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return load_settings(config_file)


def node(settings: Settings, folder: Path, engines: list[EngineProcess]) -> NodeAgent:
    channel: Any = SimpleNamespace(send=lambda *_, **__: None)
    where = NodeEndpoint("127.0.0.1", {})
    agent = NodeAgent(
        settings, 1, assign_node(settings, 0, 1), where, folder, "secret", channel, StopSignals()
    )
    agent._engines = {engine.index: engine for engine in engines}
    return agent


def test_64_engines_are_probed_and_put_to_sleep_at_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in ((module, "_ANSWER"), (module, "_LONG_ANSWER"), (node_agent, "_ANSWER")):
        monkeypatch.setattr(place, f"{name}_SECONDS", 60.0)  # room for a busy machine
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    processes = build(Listening, settings, tmp_path, 64)
    engines = Engines(settings, tmp_path, QUIET, QUIET, restarts=0)
    with answering(processes) as request_lines:
        for process in processes:
            engines.start(process)
        assert not engines.all_up
        engines.check(lambda: False)
        assert engines.all_up
        engines.check(lambda: False, closely=True)
        engines.sleep()
        assert is_trainers_turn(tmp_path)
        with node(settings, tmp_path, processes) as agent:
            agent._probe()
            assert agent._healthy == set(range(64))
    line = b"GET /health HTTP/1.1"
    assert request_lines == [line] * 128 + [b"POST /sleep?level=2&mode=abort HTTP/1.1"] * 64 + [line] * 64


def end_by_warning(settings: Settings, folder: Path, processes: list[EngineProcess]) -> None:
    engines = Engines(settings, folder, QUIET, QUIET, restarts=0)
    engines._engines += processes
    engines.stop(grace=60.0)


def end_with_the_run(settings: Settings, folder: Path, processes: list[EngineProcess]) -> None:
    supervisor = Supervisor(folder, StopSignals())
    for process in processes:
        supervisor.adopt(process)
    supervisor.close(grace=60.0)


def end_on_another_node(settings: Settings, folder: Path, processes: list[EngineProcess]) -> None:
    with node(settings, folder, processes) as agent:
        agent._handle({"kind": "stop_engines", "indices": [p.index for p in processes], "grace": 60.0})


@pytest.mark.parametrize("end", [end_by_warning, end_with_the_run, end_on_another_node])
def test_16_engines_end_at_once(settings: Settings, tmp_path: Path, end: Callable[..., None]) -> None:
    os.mkfifo(tmp_path / "gate")
    processes = build(EngineProcess, settings, tmp_path, 16)
    for process in processes:
        process._command = ["/bin/sh", "-c", ENDS_WITH_THE_OTHERS, "sh", str(tmp_path), str(process.index)]
        process.start()
        process._answered = True  # gets its grace
    leaders = [process.pid or 0 for process in processes]

    def number(word: str) -> int:
        return len(list(tmp_path.glob(f"{word}-*")))

    def open_gate() -> None:
        while number("asked") < len(processes) and not over.is_set():
            time.sleep(0.02)
        gate.append(os.open(tmp_path / "gate", os.O_RDWR))

    gate: list[int] = []
    over = threading.Event()
    opener = threading.Thread(target=open_gate)
    try:
        wait_for(lambda: number("up") == len(processes), 60)
        opener.start()
        end(settings, tmp_path, processes)
        assert number("left") == len(processes)  # none was killed
        assert members(*leaders) == []  # nor is a grandchild left
    finally:
        over.set()
        opener.join()
        os.close(gate[0])
        for process in processes:
            process.stop(grace=0.0)

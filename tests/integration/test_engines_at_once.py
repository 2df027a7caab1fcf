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
from collections.abc import Callable, Collection, Iterator
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
from rpg_megatron.launcher.cluster import Engine
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.node_agent import NodeAgent
from rpg_megatron.system.process_groups import members
from tests.support.launcher import single_node, wait_for

ENDS_WITH_THE_OTHERS = """
cd "$1"
trap 'echo > asked-$2; : < gate; echo > left-$2; exit' TERM
echo > up-$2
sleep 600 &
wait
"""
QUIET: Any = SimpleNamespace(status=lambda text: None)
"""Stands in for the progress display."""


class Listening(EngineProcess):
    """An engine that runs already; the test answers for it."""

    def start(self) -> None:
        self._child = None

    def alive(self) -> bool:
        return True


class EndsWithTheOthers(EngineProcess):
    """Ends after SIGTERM when the test opens the gate."""

    def __init__(self, settings: Settings, index: int, **places: Any):
        super().__init__(settings, index, **places)
        folder = str(self.log.parents[1])
        self._command = ["/bin/sh", "-c", ENDS_WITH_THE_OTHERS, "sh", folder, str(index)]

    def start(self) -> None:
        super().start()
        self.note_answer()  # gets its grace


@contextmanager
def answering(engines: Collection[Engine]) -> Iterator[list[bytes]]:
    """Answer the engines' requests as soon as there are as many as engines; yields their first lines."""
    request_lines: list[bytes] = []
    ended = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            for engine in engines:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(engine.address))
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


def settings_for(config_file: Path, count: int) -> Settings:
    return load_settings(config_file, [f"engine.replicas={count}"])


def test_64_engines_are_probed_and_put_to_sleep_at_once(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ANSWER", "_LONG_ANSWER"):
        monkeypatch.setattr(module, f"{name}_SECONDS", 60.0)  # room for a busy machine
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(node_agent, "EngineProcess", Listening)
    settings = settings_for(config_file, 64)
    with (
        single_node(settings, tmp_path) as (cluster, _),
        answering(cluster.engines.values()) as request_lines,
    ):
        engines = Engines(settings, tmp_path, cluster, QUIET, restarts=0)
        engines.start()
        assert not engines.all_up
        engines.check(lambda: False)
        assert engines.all_up
        engines.check(lambda: False, closely=True)
        engines.sleep()
        assert is_trainers_turn(tmp_path)
    line = b"GET /health HTTP/1.1"
    assert request_lines == [line] * 128 + [b"POST /sleep?level=2&mode=abort HTTP/1.1"] * 64


def end_by_warning(engines: Engines, agent: NodeAgent) -> None:
    engines.stop(grace=60.0)


def end_with_the_run(engines: Engines, agent: NodeAgent) -> None:
    agent.close()
    agent.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("end", [end_by_warning, end_with_the_run])
def test_16_engines_end_at_once(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    monkeypatch.setattr(node_agent, "EngineProcess", EndsWithTheOthers)
    monkeypatch.setattr(node_agent, "GRACE", 60.0)
    settings = settings_for(config_file, 16)
    os.mkfifo(tmp_path / "gate")

    def number(word: str) -> int:
        return len(list(tmp_path.glob(f"{word}-*")))

    def open_gate() -> None:
        while number("asked") < 16 and not over.is_set():
            time.sleep(0.02)
        gate.append(os.open(tmp_path / "gate", os.O_RDWR))

    gate: list[int] = []
    over = threading.Event()
    opener = threading.Thread(target=open_gate)
    with single_node(settings, tmp_path) as (cluster, agent):
        engines = Engines(settings, tmp_path, cluster, QUIET, restarts=0)
        try:
            engines.start()
            leaders = [process.pid or 0 for process in agent._engines.values()]
            wait_for(lambda: number("up") == 16)
            opener.start()
            end(engines, agent)
            assert number("left") == 16  # none was killed
            assert members(*leaders) == []  # nor is a grandchild left
        finally:
            over.set()
            opener.join()
            os.close(gate[0])

"""The line between the launcher of the first node and those of the others.

The first one writes a *meeting file* into the folder of the runs, which all nodes share: where it listens,
and the run's token, readable by its owner only. Both ends of a line prove that they know the token before
anything is said; from then on messages are JSON objects. Each end sends a sign of life every few seconds, so
that a node which vanishes without a word is noticed too. When all have come the file is removed.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.launcher.nodes import Nodes, own_address
from rpg_megatron.system.files import atomic_write_text

_BEAT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10
_PREFIX = ".meeting-"
_ABANDONED_SECONDS = 86_400.0
_LARGEST = 1 << 20
"""Bytes of a message; more is none of ours."""


class ControlChannel:
    """One end of a connection between two launchers. Messages are read and signs of life sent by threads."""

    def __init__(self, connection: Connection, *, silence: float):
        """silence: seconds without anything from the other end after which it counts as gone."""
        self.lost = ""
        """Why the line is dead; empty while it lives."""
        self._connection = connection
        self._limit = silence
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def tell(self, kind: str, **facts: Any) -> None:
        """Send a message; a dead line takes it in silence."""
        with self._sending:
            try:
                self._connection.send_bytes(json.dumps({"kind": kind, **facts}).encode())
            except (OSError, ValueError) as e:
                self.lost = self.lost or f"its connection broke ({e})"

    def take(self) -> list[dict[str, Any]]:
        """The messages that have come since this was asked last."""
        found = []
        while (message := self.take_one()) is not None:
            found.append(message)
        return found

    def take_one(self) -> dict[str, Any] | None:
        """The next message, if there is one."""
        with suppress(queue.Empty):
            return self._inbox.get_nowait()
        if not self.lost and time.monotonic() - self._heard > self._limit:
            self.lost = f"it was silent for {self._limit:.0f} s (cluster.silence)"
        return None

    def close(self) -> None:
        """Hang up."""
        self.lost = self.lost or "this end hung up"
        with suppress(OSError):  # wakes the thread that reads
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                message = json.loads(self._connection.recv_bytes(_LARGEST))
                self._heard = time.monotonic()
                if message["kind"] != "beat":
                    self._inbox.put(message)
        except EOFError:
            self.lost = self.lost or "its launcher is gone"
        except (OSError, ValueError, KeyError, TypeError) as e:
            self.lost = self.lost or f"its connection broke ({e})"

    def _beat(self) -> None:
        while not self.lost:
            self.tell("beat")
            time.sleep(min(_BEAT_SECONDS, self._limit / 4))


@dataclass
class Endpoint:
    """Where the first launcher listens; what a meeting file holds."""

    address: str
    port: int
    token: str
    machine: str
    """Its boot: a loopback address is good on the same machine only."""


class RendezvousServer:
    """The first launcher's end: it listens until all nodes have come."""

    def __init__(self, settings: Settings, nodes: Nodes):
        """Raises UserError if it cannot listen, or cannot write the meeting file."""
        self.address = own_address(settings.cluster.interface)
        self.token = secrets.token_urlsafe(32)
        self.lines: dict[int, ControlChannel] = {}
        self.joined: dict[int, dict[str, Any]] = {}
        self._settings, self._nodes = settings, nodes
        try:
            self._server = socket.create_server((self.address, 0), backlog=256)
        except OSError as e:
            raise UserError(
                f"cannot listen at {self.address} ({e.strerror or e}), this node's address; "
                "name another one: cluster.interface=..."
            ) from None
        self._file = meeting_file(settings, nodes)
        remove_abandoned(self._file.parent)
        self._arrivals: queue.SimpleQueue[ControlChannel] = queue.SimpleQueue()
        place = Endpoint(self.address, self._server.getsockname()[1], self.token, _machine())
        try:
            _write(self._file, place)
        except OSError as e:
            self._server.close()
            raise UserError(
                f"runs: {e.filename or self._file}: {e.strerror}; choose another folder"
            ) from None
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, look: Callable[[], None], status: Callable[[str], None]) -> None:
        """Until all nodes have come; calls ``look`` meanwhile, which may raise. UserError if time is up."""
        end = time.monotonic() + self._settings.cluster.join_timeout
        waiting: list[ControlChannel] = []
        others = set(range(1, self._nodes.count))
        while missing := sorted(others - self.joined.keys()):
            names = ", ".join(self._nodes.name(rank) for rank in missing)
            status(f"waiting for {names}")
            look()
            with suppress(queue.Empty):
                waiting.append(self._arrivals.get(timeout=0.2))
            for line in list(waiting):
                for message in line.take():
                    if message["kind"] == "join" and message["node"] in missing:
                        waiting.remove(line)
                        self.lines[message["node"]], self.joined[message["node"]] = line, message
            if time.monotonic() > end:
                raise UserError(
                    f"{names} did not come within {self._settings.cluster.join_timeout:.0f} s "
                    "(cluster.join_timeout); look at the output of the launcher there, and whether it can "
                    f"reach {self.address} and sees {self._file.parent}"
                )
        self._end_meeting()

    def close(self) -> None:
        """Hang up on everyone."""
        self._end_meeting()
        for line in self.lines.values():
            line.close()

    def _end_meeting(self) -> None:
        self._file.unlink(missing_ok=True)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                stranger, _ = self._server.accept()
            except OSError:  # the meeting is over
                return
            # A thread each: somebody who connects and says nothing must not keep the others out.
            threading.Thread(target=self._welcome, args=(stranger,), daemon=True).start()

    def _welcome(self, stranger: socket.socket) -> None:
        connection = _shake_hands(stranger, self.token, host=True)
        if connection is not None:
            self._arrivals.put(ControlChannel(connection, silence=self._settings.cluster.silence))


def join(settings: Settings, nodes: Nodes, look: Callable[[], None]) -> tuple[ControlChannel, Endpoint]:
    """Find the first launcher and connect to it; calls ``look`` while waiting, which may raise.

    Raises UserError if there is none in time, or if somebody else could have read the meeting file.
    """
    file = meeting_file(settings, nodes)
    end = time.monotonic() + settings.cluster.join_timeout
    problem = f"its meeting file {file} did not appear"
    while time.monotonic() < end:
        look()
        place = _read(file)
        if place is not None:
            if place.address.startswith("127.") and place.machine != _machine():
                raise UserError(
                    f"the first node gives {place.address} as its address, which only itself can reach; set "
                    "cluster.interface to the name of the cluster's network interface (ip -brief address)"
                )
            problem = f"nobody answers at {place.address}:{place.port}, where it said to be"
            with suppress(OSError):
                talk = socket.create_connection((place.address, place.port), timeout=5)
                connection = _shake_hands(talk, place.token, host=False)
                if connection is not None:
                    return ControlChannel(connection, silence=settings.cluster.silence), place
        time.sleep(0.2)
    raise UserError(
        f"{nodes.name(0)} was not found within {settings.cluster.join_timeout:.0f} s (cluster.join_timeout): "
        f"{problem}; all nodes need the same run settings and see the same folder"
    )


def meeting_file(settings: Settings, nodes: Nodes) -> Path:
    """Where the nodes of one start find each other."""
    return settings.runs.absolute() / f"{_PREFIX}{nodes.job or settings.name}.json"


def remove_abandoned(folder: Path) -> None:
    """Remove the meeting files, tokens in them, of launchers that were killed before all nodes had come.

    A launcher listens for as long as its file is there. One whose machine does not say whether it does is
    given up after a day.
    """
    for file in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError, UserError):  # somebody else's, or just removed
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS or _nobody_listens(_read(file)):
                file.unlink()


def _nobody_listens(place: Endpoint | None) -> bool:
    """Whether that is known."""
    if place is None or (place.address.startswith("127.") and place.machine != _machine()):
        return False
    try:
        socket.create_connection((place.address, place.port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _write(file: Path, place: Endpoint) -> None:
    """Whole or not at all, and never readable by others. What an earlier start left there is replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, json.dumps(place.__dict__), private=True)


def _read(file: Path) -> Endpoint | None:
    """None while there is none. Raises UserError if others may read it: its token is then no secret."""
    try:
        with file.open(encoding="utf-8") as f:
            status = os.fstat(f.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UserError(
                    f"{file} holds a token and is not private (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):04o}); the folder of the runs must keep mode 0600"
                )
            return Endpoint(**json.load(f))
    except (OSError, ValueError, TypeError):
        return None


def _shake_hands(talk: socket.socket, token: str, *, host: bool) -> Connection | None:
    """Both sides prove that they know the token; None if the other one does not, or hangs."""
    talk.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        talk.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
    connection = Connection(talk.detach())
    steps = (deliver_challenge, answer_challenge) if host else (answer_challenge, deliver_challenge)
    try:
        for step in steps:
            step(connection, token.encode())
    except (AuthenticationError, EOFError, OSError, AssertionError):
        connection.close()
        return None
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

"""The control connections between the first node's launcher and those of the other nodes.

The first launcher writes a rendezvous file into the folder of the runs, which all nodes share: its address
and the run's token, readable only by the owner. Both ends of a connection prove that they know the token;
then they exchange JSON objects. Each end sends a heartbeat every few seconds, so that a node that fails
silently is detected. The file is removed when all nodes have joined.

Not the messages of ``system/messages.py``: each end must notice that the other has exited or is silent, and
tell which, also while its main thread is busy; and a launcher starts faster without asyncio.
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
from rpg_megatron.config.files import atomic_write_text, open_own, remove
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.nodes import Nodes, own_address
from rpg_megatron.launcher.supervisor import RunFailed
from rpg_megatron.system.process_groups import boot_id

_HEARTBEAT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10
_PREFIX = ".meeting-"
_ABANDONED_SECONDS = 86_400.0
_MAX_MESSAGE_BYTES = 1 << 20
"""Size of the largest valid message."""


class ControlChannel:
    """One end of a connection between two launchers. Threads read messages and send heartbeats."""

    def __init__(self, connection: Connection, *, silence: float):
        """silence: seconds without a message after which the other end counts as lost."""
        self.lost = ""
        """Why the connection is lost; empty while it is open."""
        self._connection = connection
        self._limit = silence
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        for work in (self._read, self._heartbeat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; has no effect if the connection is lost."""
        with self._sending:
            try:
                self._connection.send_bytes(json.dumps({"kind": kind, **facts}).encode())
            except (OSError, ValueError) as e:
                self.lost = self.lost or _why_lost(e)

    def receive(self) -> list[dict[str, Any]]:
        """All messages received since the last call."""
        messages = []
        while (message := self.receive_one()) is not None:
            messages.append(message)
        return messages

    def receive_one(self) -> dict[str, Any] | None:
        """The next message; None if there is none."""
        with suppress(queue.Empty):
            return self._inbox.get_nowait()
        if not self.lost and time.monotonic() - self._heard > self._limit:
            self.lost = f"it was silent for {self._limit:.0f} s (cluster.silence)"
        return None

    def close(self) -> None:
        """Close the connection."""
        self.lost = self.lost or "this end closed it"
        with suppress(OSError):  # wakes the thread that reads
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                message = json.loads(self._connection.recv_bytes(_MAX_MESSAGE_BYTES))
                self._heard = time.monotonic()
                if message["kind"] != "heartbeat":
                    self._inbox.put(message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as e:
            self.lost = self.lost or _why_lost(e)

    def _heartbeat(self) -> None:
        while not self.lost:
            self.send("heartbeat")
            time.sleep(min(_HEARTBEAT_SECONDS, self._limit / 4))


def _why_lost(error: Exception) -> str:
    # The kernel resets the connection of a process that is killed while messages for it are unread.
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
        return "its launcher has exited"
    return f"its connection broke ({error})"


@dataclass
class Endpoint:
    """Address at which the first launcher listens; the content of a rendezvous file."""

    address: str
    port: int
    token: str
    machine: str
    """Boot id: a loopback address is valid on the same machine only."""


class RendezvousServer:
    """The first launcher's end: listens until all nodes have joined."""

    def __init__(self, settings: Settings, nodes: Nodes):
        """Raises UserError if it cannot listen, or cannot write the rendezvous file."""
        self.address = own_address(settings.cluster.interface)
        self.token = secrets.token_urlsafe(32)
        self.channels: dict[int, ControlChannel] = {}
        self.joined: dict[int, dict[str, Any]] = {}
        self._settings, self._nodes = settings, nodes
        try:
            self._server = socket.create_server((self.address, 0), backlog=256)
        except OSError as e:
            raise UserError(
                f"cannot listen at {self.address} ({e.strerror or e}), this node's address; "
                "set another one with cluster.interface=..."
            ) from None
        self._file = rendezvous_file(settings, nodes)
        remove_abandoned_files(self._file.parent)
        self._arrivals: queue.SimpleQueue[ControlChannel] = queue.SimpleQueue()
        endpoint = Endpoint(self.address, self._server.getsockname()[1], self.token, boot_id())
        try:
            _write_endpoint(self._file, endpoint)
        except OSError as e:
            self._server.close()
            raise UserError(
                f"runs: {e.filename or self._file}: {e.strerror}; choose another folder"
            ) from None
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, poll: Callable[[], None], status: Callable[[str], None]) -> None:
        """Wait until all nodes have joined. Raises RunFailed after a timeout.

        poll: called while waiting; may raise. status: called with the nodes that are missing.
        """
        end = time.monotonic() + self._settings.cluster.join_timeout
        waiting: list[ControlChannel] = []
        others = set(range(1, self._nodes.count))
        while missing := sorted(others - self.joined.keys()):
            names = ", ".join(self._nodes.name(rank) for rank in missing)
            status(f"waiting for {names}")
            poll()
            with suppress(queue.Empty):
                waiting.append(self._arrivals.get(timeout=0.2))
            for channel in list(waiting):
                for message in channel.receive():
                    if message["kind"] == "join" and message["node"] in missing:
                        waiting.remove(channel)
                        self.channels[message["node"]], self.joined[message["node"]] = channel, message
            if time.monotonic() > end:
                seconds = self._settings.cluster.join_timeout
                problem = f"{names} did not join within {seconds:.0f} s (cluster.join_timeout)"
                hosts = tuple(self._nodes.hosts[rank] for rank in missing) if self._nodes.hosts else ()
                raise RunFailed(
                    f"{problem}; check the output of the launcher there, and that it "
                    f"can reach {self.address} and sees {self._file.parent}",
                    Failure(problem, machine=True, nodes=hosts),
                )
        self._stop_listening()

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for channel in self.channels.values():
            channel.close()

    def _stop_listening(self) -> None:
        remove(self._file)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:  # the server is closed
                return
            # One thread per peer, so that a silent peer does not block the others.
            threading.Thread(target=self._authenticate, args=(peer,), daemon=True).start()

    def _authenticate(self, peer: socket.socket) -> None:
        connection = _handshake(peer, self.token, host=True)
        if connection is not None:
            self._arrivals.put(ControlChannel(connection, silence=self._settings.cluster.silence))


def join(settings: Settings, nodes: Nodes, poll: Callable[[], None]) -> tuple[ControlChannel, Endpoint]:
    """Find the first launcher and connect to it. poll: called while waiting; may raise.

    Raises UserError after a timeout, or if other users can read the rendezvous file.
    """
    file = rendezvous_file(settings, nodes)
    end = time.monotonic() + settings.cluster.join_timeout
    problem = f"its rendezvous file {file} did not appear"
    while time.monotonic() < end:
        poll()
        endpoint = _read_endpoint(file)
        if endpoint is not None:
            if endpoint.address.startswith("127.") and endpoint.machine != boot_id():
                raise UserError(
                    f"the first node gives {endpoint.address} as its address, a loopback address; set "
                    "cluster.interface to the name of the cluster's network interface (ip -brief address)"
                )
            problem = f"no answer at {endpoint.address}:{endpoint.port}, the address in its rendezvous file"
            with suppress(OSError):
                sock = socket.create_connection((endpoint.address, endpoint.port), timeout=5)
                connection = _handshake(sock, endpoint.token, host=False)
                if connection is not None:
                    return ControlChannel(connection, silence=settings.cluster.silence), endpoint
        time.sleep(0.2)
    raise UserError(
        f"{nodes.name(0)} was not found within {settings.cluster.join_timeout:.0f} s (cluster.join_timeout): "
        f"{problem}; all nodes need the same settings and must see the same folder"
    )


def rendezvous_file(settings: Settings, nodes: Nodes) -> Path:
    """The file through which the nodes of a run find each other."""
    return settings.runs.absolute() / f"{_PREFIX}{nodes.job or settings.name}.json"


def remove_abandoned_files(folder: Path) -> None:
    """Remove rendezvous files, which contain tokens, of launchers that were killed before all nodes joined.

    A launcher listens while its file exists. If its machine does not answer, the file is removed after a day.
    """
    for file in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError, UserError):  # another user's, or just removed
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS or _is_closed(_read_endpoint(file)):
                remove(file)


def _is_closed(endpoint: Endpoint | None) -> bool:
    """Whether it is certain that no launcher listens there."""
    if endpoint is None or (endpoint.address.startswith("127.") and endpoint.machine != boot_id()):
        return False
    try:
        socket.create_connection((endpoint.address, endpoint.port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _write_endpoint(file: Path, endpoint: Endpoint) -> None:
    """Write the file atomically, readable only by the owner. Replaces the file of an earlier start."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, json.dumps(endpoint.__dict__), private=True)


def _read_endpoint(file: Path) -> Endpoint | None:
    """Read a rendezvous file; None if there is none. Raises UserError if others can read it and its token."""
    try:
        with open_own(file, "r", encoding="utf-8") as f:
            status = os.fstat(f.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UserError(
                    f"{file} holds a token and is not private (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):04o}); the folder of the runs must keep mode 0600"
                )
            return Endpoint(**json.load(f))
    except (OSError, ValueError, TypeError):
        return None


def _handshake(sock: socket.socket, token: str, *, host: bool) -> Connection | None:
    """Authenticate a connection in both directions; None if the other side fails or hangs."""
    sock.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
    connection = Connection(sock.detach())
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

"""The control connections between the first node's launcher and those of the other nodes.

The first launcher writes a rendezvous file into the folder of the runs, which all nodes share: its address, a
port for each node, and the run's token, readable only by the owner. Messages are JSON objects over ZeroMQ,
with keys that are derived from the token. ZeroMQ's own thread sends heartbeats, so that a node that fails
silently is detected. The file is removed when all nodes have joined.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import atomic_write_text, open_own, remove
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.nodes import Nodes, own_address
from rpg_megatron.launcher.supervisor import RunFailed
from rpg_megatron.system.process_groups import boot_id
from rpg_megatron.system.socket_keys import secure

_HANDSHAKE_SECONDS = 10
_LAST_WORDS_SECONDS = 2
"""How long a closed channel may take to send its last messages."""
_PREFIX = ".meeting-"
_ABANDONED_SECONDS = 86_400.0
_MAX_MESSAGE_BYTES = 1 << 20
"""Size of the largest valid message."""
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_EVENTS = _OPENED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ControlChannel:
    """One end of a connection between two launchers. For one thread; call ``receive`` often."""

    def __init__(self, token: str, silence: float, context: zmq.Context[Any] | None = None):
        """silence: seconds without a heartbeat after which the other end counts as lost."""
        self.connected = False
        self.lost = ""
        """Why the connection is lost; empty before it is made, and while it is open."""
        self._token, self._silence = token, silence
        self._own_context = None if context else zmq.Context()
        self._socket = (context or self._own_context).socket(zmq.PAIR)  # type: ignore[union-attr]
        self._socket.heartbeat_ivl = int(250 * silence)
        self._socket.heartbeat_timeout = int(750 * silence)
        self._socket.handshake_ivl = 1000 * _HANDSHAKE_SECONDS
        self._socket.reconnect_ivl = -1
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._events = self._socket.get_monitor_socket(_EVENTS)
        self._connections: dict[int, socket.socket | None] = {}
        """Descriptors of open connections, which may be strangers', and copies, which tell why one ends."""

    def listen(self, address: str) -> int:
        """Wait for the other end; returns the port. Raises zmq.ZMQError."""
        secure(self._socket, self._token, server=True)
        return self._socket.bind_to_random_port(f"tcp://{address}")

    def connect(self, address: str, port: int) -> None:
        """Connect to an end that listens; ``connected`` tells later whether that has succeeded."""
        secure(self._socket, self._token, server=False)
        self._socket.connect(f"tcp://{address}:{port}")

    def stop_listening(self) -> None:
        """Let nobody else connect."""
        with suppress(zmq.ZMQError):  # it did not listen
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; has no effect if the connection is lost."""
        with suppress(zmq.ZMQError):
            self._socket.send(json.dumps({"kind": kind, **facts}).encode(), zmq.NOBLOCK)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages received since the last call. Then ``connected`` and ``lost`` are up to date."""
        self.watch()  # before the messages: those that arrived before the end are received before it is told
        with suppress(zmq.ZMQError):
            while True:
                yield json.loads(self._socket.recv(zmq.NOBLOCK))

    def watch(self) -> None:
        """Update ``connected`` and ``lost``."""
        while not self._socket.closed and self._events.poll(0):
            event = recv_monitor_message(self._events)
            kind, descriptor = event["event"], event["value"]
            if kind & _OPENED:
                self._connections[descriptor] = None
                with suppress(OSError):  # it has ended already
                    self._connections[descriptor] = socket.socket(fileno=os.dup(descriptor))
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.lost = True, ""
            elif descriptor in self._connections:
                why = self._why_lost(self._connections.pop(descriptor))
                if self.connected and not self._connections:
                    self.lost = why

    def close(self) -> None:
        """Send what is still to be sent, and close the connection."""
        self.lost = self.lost or "this end closed it"
        self._socket.disable_monitor()
        self._socket.close(linger=1000 * _LAST_WORDS_SECONDS)
        if self._own_context:
            self._own_context.term()
        for copy in self._connections.values():
            if copy:
                copy.close()
        self._connections.clear()

    def _why_lost(self, connection: socket.socket | None) -> str:
        """ZeroMQ closes a connection at its end, and after a silence, without telling which."""
        if connection is not None:
            with connection, suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise BlockingIOError
                return "its launcher has exited"
            return f"it was silent for {self._silence:.0f} s (cluster.silence)"
        return "its launcher has exited"


@dataclass
class Endpoint:
    """Address at which the first launcher listens; the content of a rendezvous file."""

    address: str
    ports: list[int]
    """For nodes 1, 2, ..."""
    token: str
    machine: str
    """Boot id: a loopback address is valid on the same machine only."""


class RendezvousServer:
    """The first launcher's end: listens until all nodes have joined."""

    def __init__(self, settings: Settings, nodes: Nodes):
        """Raises UserError if it cannot listen, or cannot write the rendezvous file."""
        self.address = own_address(settings.cluster.interface)
        self.token = secrets.token_urlsafe(32)
        self.joined: dict[int, dict[str, Any]] = {}
        """Node -> its message "join"."""
        self._settings, self._nodes = settings, nodes
        self._file = rendezvous_file(settings, nodes)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 1024 + 4 * nodes.count  # a channel and its monitor are three
        self.channels = {
            node: ControlChannel(self.token, settings.cluster.silence, self._context)
            for node in range(1, nodes.count)
        }
        try:
            ports = [channel.listen(self.address) for channel in self.channels.values()]
            remove_abandoned_files(self._file.parent)
            endpoint = Endpoint(self.address, ports, self.token, boot_id())
            # Atomic, readable only by the owner; it replaces the file of an earlier start.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self._file, json.dumps(asdict(endpoint)), private=True)
        except zmq.ZMQError as e:
            self.close()
            raise UserError(
                f"cannot listen at {self.address} ({e.strerror}), this node's address; "
                "set another one with cluster.interface=..."
            ) from None
        except OSError as e:
            self.close()
            raise UserError(
                f"runs: {e.filename or self._file}: {e.strerror}; choose another folder"
            ) from None

    def wait(self, poll: Callable[[], None], status: Callable[[str], None]) -> None:
        """Wait until all nodes have joined. Raises RunFailed after a timeout.

        poll: called while waiting; may raise. status: called with the nodes that are missing.
        """
        end = time.monotonic() + self._settings.cluster.join_timeout
        while missing := sorted(self.channels.keys() - self.joined.keys()):
            names = ", ".join(self._nodes.name(node) for node in missing)
            status(f"waiting for {names}")
            poll()
            time.sleep(0.1)
            for node in missing:
                for message in self.channels[node].receive():
                    self.joined[node] = message
            if time.monotonic() > end:
                seconds = self._settings.cluster.join_timeout
                problem = f"{names} did not join within {seconds:.0f} s (cluster.join_timeout)"
                hosts = tuple(self._nodes.hosts[node] for node in missing) if self._nodes.hosts else ()
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
        self._context.term()

    def _stop_listening(self) -> None:
        remove(self._file)
        for channel in self.channels.values():
            channel.stop_listening()


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
        if endpoint is not None and len(endpoint.ports) >= nodes.rank:
            if endpoint.address.startswith("127.") and endpoint.machine != boot_id():
                raise UserError(
                    f"the first node gives {endpoint.address} as its address, a loopback address; set "
                    "cluster.interface to the name of the cluster's network interface (ip -brief address)"
                )
            port = endpoint.ports[nodes.rank - 1]
            problem = f"no answer at {endpoint.address}:{port}, the address in its rendezvous file"
            channel = ControlChannel(endpoint.token, settings.cluster.silence)
            channel.connect(endpoint.address, port)
            limit = min(end, time.monotonic() + 5)
            while time.monotonic() < limit and not channel.connected and _read_endpoint(file) == endpoint:
                poll()
                time.sleep(0.05)
                channel.watch()
            if channel.connected:
                return channel, endpoint
            channel.close()
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
        socket.create_connection((endpoint.address, endpoint.ports[0]), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


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

"""The control connections between the first node's launcher and those of the other nodes.

The first launcher writes a rendezvous file into the folder of the runs, which all nodes share: its address
and the run's token, readable only by the owner. Messages are JSON objects over ZeroMQ, encrypted with keys
that are derived from the token. ZeroMQ's own thread sends heartbeats, so that a node that fails silently is
detected, and one that works for long is not. The file is removed when all nodes have joined.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import atomic_write_text, open_own, remove
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.nodes import Nodes, own_address
from rpg_megatron.launcher.stopping import RunFailed
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


class _Socket:
    """A socket with heartbeats, and the state of its connections. For one thread."""

    def __init__(self, kind: int, token: str, silence: float):
        """silence: seconds without a heartbeat after which a connection ends."""
        self.authenticated = False
        """Whether an end that knows the token has connected."""
        self.open: dict[int, socket.socket | None] = {}
        """Descriptors of open connections, also those of strangers, and copies, which tell why one ends."""
        self._silence = silence
        self._context: zmq.Context[Any] = zmq.Context()
        self.zmq = self._context.socket(kind)
        secure(self.zmq, token, server=kind == zmq.ROUTER)
        self.zmq.heartbeat_ivl = int(250 * silence)
        self.zmq.heartbeat_timeout = int(750 * silence)
        self.zmq.handshake_ivl = 1000 * _HANDSHAKE_SECONDS
        self.zmq.reconnect_ivl = -1
        self.zmq.maxmsgsize = _MAX_MESSAGE_BYTES
        events = _OPENED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.zmq.monitor("inproc://events", events)
        self._events = self._context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # a full queue would stop ZeroMQ's thread, and with it the heartbeats
        self._events.connect("inproc://events")

    def ended(self) -> list[tuple[int, str]]:
        """Descriptors of connections that have ended since the last call, and why."""
        ended = []
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            kind, descriptor = event["event"], int(event["value"])
            if kind & _OPENED:
                self.open[descriptor] = _copy(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.authenticated = True
            elif descriptor in self.open:
                ended.append((descriptor, self._why_ended(self.open.pop(descriptor))))
        return ended

    def close(self) -> None:
        """Send what is still to be sent, and close all connections."""
        if self.zmq.closed:
            return
        self.zmq.disable_monitor()
        self._events.close(linger=0)
        self.zmq.close(linger=1000 * _LAST_WORDS_SECONDS)
        self._context.term()
        for copy in filter(None, self.open.values()):
            copy.close()
        self.open.clear()

    def _why_ended(self, connection: socket.socket | None) -> str:
        """ZeroMQ ends a connection after a silence, and when the other end does, without telling which."""
        silent = False
        if connection is not None:
            with connection, suppress(ConnectionError):
                try:
                    silent = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
                except (BlockingIOError, TimeoutError):
                    silent = True
        after = f"it was silent for {self._silence:.0f} s (cluster.silence)"
        return after if silent else "its launcher has exited"


def _copy(descriptor: int) -> socket.socket | None:
    """A copy of a connection's descriptor; None if it has ended: the descriptor may be a file's by now."""
    with suppress(OSError), ExitStack() as undo:
        copy = os.dup(descriptor)
        undo.callback(os.close, copy)
        connection = socket.socket(fileno=copy)
        undo.pop_all()
        return connection
    return None


class ControlChannel:
    """The end of a launcher that is not the first. For one thread; call ``receive`` often."""

    def __init__(self, node: int, endpoint: Endpoint, silence: float):
        """Connect; does not wait. silence: see ``_Socket``."""
        self.lost = ""
        """Why the connection is lost; empty before it is made, and while it is open."""
        self._socket = _Socket(zmq.DEALER, endpoint.token, silence)
        self._socket.zmq.routing_id = str(node).encode()
        self._socket.zmq.connect(f"tcp://{endpoint.address}:{endpoint.port}")

    def wait(self, seconds: float, poll: Callable[[], None]) -> bool:
        """Wait until it is connected; returns whether it is. poll: called while waiting."""
        end = time.monotonic() + seconds
        while not self._socket.authenticated and not self.lost and time.monotonic() < end:
            poll()
            time.sleep(0.05)
            self._watch()
        return self._socket.authenticated

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; has no effect if the connection is lost."""
        with suppress(zmq.ZMQError):
            self._socket.zmq.send(json.dumps({"kind": kind, **facts}).encode(), zmq.NOBLOCK)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages received since the last call. Then ``lost`` is up to date."""
        self._watch()  # before the messages: those that arrived before the end are received before it is told
        with suppress(zmq.ZMQError):
            while True:
                yield json.loads(self._socket.zmq.recv(zmq.NOBLOCK))

    def close(self) -> None:
        """Send what is still to be sent, and close the connection."""
        self._socket.close()

    def _watch(self) -> None:
        for _, why in self._socket.ended():
            self.lost = why


@dataclass
class Endpoint:
    """Address at which the first launcher listens; the content of a rendezvous file."""

    address: str
    port: int
    token: str
    machine: str
    """Boot id: a loopback address is valid on the same machine only."""


class NodeChannel:
    """The first launcher's end of its connection to another node."""

    def __init__(self, server: RendezvousServer, node: int):
        self.lost = ""
        """Why the connection is lost; empty before it is made, and while it is open."""
        self.inbox: deque[dict[str, Any]] = deque()
        self._server, self._node = server, str(node).encode()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; has no effect if the connection is lost."""
        self._server.socket.zmq.send_multipart([self._node, json.dumps({"kind": kind, **facts}).encode()])

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages received since the last call. Then ``lost`` is up to date."""
        self._server.pump()
        while self.inbox:
            yield self.inbox.popleft()


class RendezvousServer:
    """The first launcher's end of all connections."""

    def __init__(self, settings: Settings, nodes: Nodes):
        """Raises UserError if it cannot listen, or cannot write the rendezvous file."""
        self.address = own_address(settings.cluster.interface)
        self.token = secrets.token_urlsafe(32)
        self.joined: dict[int, dict[str, Any]] = {}
        """Node -> its message "join"."""
        self.channels = {node: NodeChannel(self, node) for node in range(1, nodes.count)}
        self._settings, self._nodes = settings, nodes
        self._by_connection: dict[int, int] = {}
        """Descriptor of a connection -> the node that has joined over it."""
        self._ended: list[tuple[int, str]] = []
        self._stray = ""
        """What is wrong with a launcher that wants to join."""
        self._file = rendezvous_file(settings, nodes)
        self.socket = _Socket(zmq.ROUTER, self.token, settings.cluster.silence)
        try:
            port = self.socket.zmq.bind_to_random_port(f"tcp://{self.address}")
            remove_abandoned_files(self._file.parent)
            endpoint = Endpoint(self.address, port, self.token, boot_id())
            # Atomic, readable only by the owner; it replaces the file of an earlier start.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self._file, json.dumps(asdict(endpoint)), private=True)
        except zmq.ZMQBaseError as e:
            self.socket.close()
            raise UserError(
                f"cannot listen at {self.address} ({e}), this node's address; "
                "set another one with cluster.interface=..."
            ) from None
        except OSError as e:
            self.socket.close()
            raise UserError(
                f"runs: {e.filename or self._file}: {e.strerror}; choose another folder"
            ) from None

    def pump(self) -> None:
        """Receive the messages of all nodes; notice which are lost."""
        # Before the messages: those that arrived before the end are received.
        ended, self._ended = [*self._ended, *self.socket.ended()], []
        # Of connections over which nodes joined earlier: others may have their descriptors by now.
        lost = {self._by_connection.pop(d): why for d, why in ended if d in self._by_connection}
        with suppress(zmq.Again):
            while True:
                sender, body = self.socket.zmq.recv_multipart(zmq.NOBLOCK, copy=False)
                node, message = int(sender.bytes), json.loads(body.bytes)
                if message["kind"] == "join" and message["nodes"] != self._nodes.count:
                    self._stray = f"node {node} ({message['host']}) was started for {message['nodes']} nodes"
                elif node not in self.channels:
                    continue
                elif message["kind"] == "join":
                    self._by_connection[body.get(zmq.SRCFD)] = node
                    self.joined[node], self.channels[node].lost = message, ""
                    lost.pop(node, None)
                else:
                    self.channels[node].inbox.append(message)
        self._ended = self.socket.ended()  # whose last messages may not be here yet
        for descriptor, why in ended:
            if descriptor in self._by_connection and descriptor not in self.socket.open:
                lost[self._by_connection.pop(descriptor)] = why  # it has joined and ended
        for node, why in lost.items():
            self.channels[node].lost = why

    def wait(self, poll: Callable[[], None]) -> None:
        """Print the nodes that are missing until all have joined. poll: called while waiting; may raise.

        Raises RunFailed after a timeout, UserError if a node was started for another number of nodes.
        """
        names, end = "", time.monotonic() + self._settings.cluster.join_timeout
        while missing := sorted(self.channels.keys() - self.joined.keys()):
            told, names = names, ", ".join(self._nodes.name(node) for node in missing)
            if names != told:
                print(f"waiting for {names}", flush=True)
            poll()
            time.sleep(0.1)
            self.pump()
            if self._stray:
                raise UserError(f"{self._stray}, this one for {self._nodes.count}; give all the same --nodes")
            if time.monotonic() > end:
                seconds = self._settings.cluster.join_timeout
                problem = f"{names} did not join within {seconds:.0f} s (cluster.join_timeout)"
                hosts = tuple(self._nodes.hosts[node] for node in missing) if self._nodes.hosts else ()
                raise RunFailed(
                    f"{problem}; check the output of the launcher there, and that it "
                    f"can reach {self.address} and sees {self._file.parent}",
                    Failure(problem, machine=True, nodes=hosts),
                )
        remove(self._file)

    def close(self) -> None:
        """Close all connections."""
        remove(self._file)
        self.socket.close()


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
            channel = ControlChannel(nodes.rank, endpoint, settings.cluster.silence)
            if channel.wait(min(5, end - time.monotonic()), poll):
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
        socket.create_connection((endpoint.address, endpoint.port), timeout=2).close()
    except OSError as e:
        return isinstance(e, ConnectionRefusedError)
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

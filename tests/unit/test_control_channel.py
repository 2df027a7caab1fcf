"""Connections of launchers: strangers and ends in an awkward order neither break nor hide anything.

Why: the first launcher listens during the whole run. What fails in it ends the run on all nodes, and a node
whose end it does not notice lets it wait for ever. Sockets are real; other launchers are channels of this
process. Not covered: whole launchers (tests/integration/test_launcher_nodes.py).
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.launcher import control_channel
from rpg_megatron.launcher.cluster import Cluster
from rpg_megatron.launcher.control_channel import ControlChannel, Endpoint, RendezvousServer, rendezvous_file
from rpg_megatron.launcher.nodes import Nodes
from rpg_megatron.launcher.stopping import StopSignals
from tests.support.launcher import wait_for

SILENCE = 3.0


class Meeting:
    """A first launcher's server, and the channels of others."""

    def __init__(self, settings: Settings, server: RendezvousServer, stack: ExitStack):
        self.server, self._stack = server, stack
        endpoint = control_channel._read_endpoint(rendezvous_file(settings, Nodes(0, 3, "job-x")))
        assert endpoint is not None
        self.endpoint: Endpoint = endpoint

    def knock(self) -> socket.socket:
        """A stranger, whose connection is reset when it closes it."""
        stranger = socket.create_connection((self.endpoint.address, self.endpoint.port))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return stranger

    def connect(self, node: int, nodes: int = 3) -> ControlChannel:
        """The channel of a node that asks to join."""
        channel = ControlChannel(node, self.endpoint, SILENCE)
        self._stack.callback(channel.close)
        assert channel.wait(20, lambda: None)
        channel.send("join", nodes=nodes, host=f"host-{node}")
        return channel

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> object:
            self.server.pump()
            return condition()

        wait_for(look, 20)

    def join(self, node: int) -> ControlChannel:
        channel = self.connect(node)
        self.until(lambda: node in self.server.joined)
        return channel

    def leave(self, node: int, channel: ControlChannel) -> None:
        """Close a node's channel; returns when the server's side is closed, which the server has not read."""
        (descriptor,) = (d for d, n in self.server._by_connection.items() if n == node)
        inode = os.fstat(descriptor).st_ino

        def is_closed() -> bool:
            try:
                return os.fstat(descriptor).st_ino != inode
            except OSError:
                return True

        channel.close()
        wait_for(is_closed, 20)
        assert descriptor in self.server.socket.open


@pytest.fixture
def settings(config_file: Path) -> Settings:
    fit = ["bridge.transport=process_group", "parallel.data=3", "engine.replicas=3"]
    return load_settings(
        config_file, [*fit, f"cluster={{interface: lo, join_timeout: 20, silence: {SILENCE}}}"]
    )


@pytest.fixture
def meeting(settings: Settings) -> Iterator[Meeting]:
    with ExitStack() as stack:
        server = RendezvousServer(settings, Nodes(0, 3, "job-x"))
        stack.callback(server.close)
        yield Meeting(settings, server, stack)


def test_a_stranger_that_resets_its_connection(meeting: Meeting) -> None:
    null = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZeroMQ without keys is refused
    stranger = meeting.knock()
    meeting.until(lambda: meeting.server.socket.open)
    stranger.settimeout(20)
    stranger.sendall(null)
    with suppress(ConnectionError):
        stranger.recv(64, socket.MSG_WAITALL)  # ZeroMQ has read it: it sends its version and keys after ours
    stranger.close()
    meeting.until(lambda: not meeting.server.socket.open)


def test_strangers_leave_no_descriptors(meeting: Meeting) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        meeting.knock().close()
        wait_for(lambda: meeting.server.socket._events.poll(0) and count() == before, 20)
        with ExitStack() as files:  # which get the descriptors of the connections
            for _ in range(4):
                files.enter_context(Path(__file__).open())
            meeting.server.pump()
    assert count() == before


def test_many_strangers_do_not_stop_the_heartbeats(meeting: Meeting) -> None:
    """While the first launcher stops engines, it looks at no connection."""
    channel = meeting.join(1)

    def knock() -> None:
        for _ in range(2000):
            meeting.knock().close()

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    end = time.monotonic() + 2 * SILENCE
    while time.monotonic() < end or thread.is_alive():
        assert list(channel.receive()) == []
        assert channel.lost == ""
        time.sleep(0.1)
    meeting.server.pump()
    assert meeting.server.channels[1].lost == ""


def test_a_lost_node_whose_descriptor_another_node_has(meeting: Meeting) -> None:
    meeting.leave(1, meeting.join(1))
    meeting.join(2)
    meeting.until(lambda: meeting.server.channels[1].lost)
    assert meeting.server.channels[1].lost == "its launcher has exited"
    assert meeting.server.channels[2].lost == ""


def test_a_node_that_comes_again_is_not_lost(meeting: Meeting) -> None:
    """Its connection may have the descriptor of the one before."""
    for _ in range(3):
        again = meeting.join(1)
        assert meeting.server.channels[1].lost == ""
        again.close()
        meeting.until(lambda: meeting.server.channels[1].lost)
        meeting.server.joined.clear()


@pytest.mark.parametrize("node", [1, 4])
def test_a_launcher_of_another_number_of_nodes(meeting: Meeting, node: int) -> None:
    meeting.connect(node, nodes=5)
    told = rf"node {node} \(host-{node}\) was started for 5 nodes, this one for 3; .* --nodes"
    with pytest.raises(UserError, match=told):
        meeting.server.wait(lambda: None)
    meeting.server.pump()


def test_last_words_are_the_cause(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they and the end arrive while the messages of the next node are read."""
    with ExitStack() as stack:
        cluster = Cluster(settings, Nodes(0, 3, "job-x"), StopSignals())
        stack.callback(cluster._server.close)
        meeting = Meeting(settings, cluster._server, stack)
        first, _ = meeting.join(1), meeting.join(2)
        receive = cluster._agents[2].receive

        def late() -> Iterator[dict[str, object]]:
            first.send("refused", message="no GPU is visible")
            meeting.leave(1, first)
            return receive()

        with monkeypatch.context() as patch:
            patch.setattr(cluster._agents[2], "receive", late)
            cluster.pump()
        with pytest.raises(UserError, match=r"node 1 \(host-1\): no GPU is visible"):
            cluster.pump()

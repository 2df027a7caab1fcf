"""Messages between the processes of a run: values and errors cross, strangers do not, deaths are noticed.

Why: rank 0 waits for hours for an answer; it must get the sampler's own message, or learn that there is none.
Not covered: what the messages mean (test_sampler, tests/integration/test_sampler_workers.py).
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.engine.client import EngineError
from rpg_megatron.rollout.sampler import Sampler
from rpg_megatron.rollout.sampler_client import SamplerRequests
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.system.messages import (
    AsyncClient,
    Client,
    Server,
    methods_of,
    remote_calls,
)


@dataclass
class Point:
    place: NDArray[np.float64]
    name: str | None = None


async def double(point: Point, times: int) -> Point:
    return Point(point.place * times, point.name)


async def touch(file: Path) -> Path:
    return file / "x"


async def refuse() -> None:
    raise UserError("set evaluation.data")


async def lose() -> None:
    raise EngineError("engine 1 is gone")


async def fail() -> None:
    raise ZeroDivisionError("a bug")


async def wait() -> None:
    WAITING.set()
    await asyncio.sleep(60)


WAITING = threading.Event()
METHODS = {f.__name__: f for f in (double, touch, refuse, lose, fail, wait)}


@contextmanager
def serving(address: str, token: str = "secret") -> Iterator[str]:
    """A server in a thread; yields its address."""
    loop, addresses = asyncio.new_event_loop(), []

    async def start() -> asyncio.Task[None]:
        server = Server(token, METHODS)
        addresses.append(server.listen(address))
        return asyncio.create_task(server.serve())

    task = loop.run_until_complete(start())

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.run_until_complete(asyncio.sleep(0))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.mark.parametrize("tcp", [False, True])
def test_values_and_errors_cross(address: str, tcp: bool) -> None:
    with serving("tcp://127.0.0.1:*" if tcp else address) as endpoint:
        client = Client(endpoint, "secret", name="sampler", timeout=20)
        answer = client.call("double", Point, Point(np.array([1.5, np.nan])), 2)
        assert isinstance(answer, Point)
        np.testing.assert_array_equal(answer.place, [3.0, np.nan])
        answer.place[0] = 1.0  # its own memory
        assert client.call("touch", Path, Path("/a")) == Path("/a/x")
        with pytest.raises(UserError, match=r"^set evaluation.data$"):
            client.call("refuse", None)
        with pytest.raises(RuntimeError, match=r"^engine 1 is gone$"):
            client.call("lose", None)
        with pytest.raises(RuntimeError, match=r"(?s)fail failed: .*a bug.*Traceback"):
            client.call("fail", None)
        with pytest.raises(RuntimeError, match="unknown method 'nonsense'; use one of double"):
            client.call("nonsense", None)
        with pytest.raises(RuntimeError, match="Expected `int`"):
            client.call("double", Point, Point(np.zeros(1)), "two")
        client.close()


def test_a_connection_that_is_made_at_once_is_noticed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank once waited two minutes for a sampler that had answered before the rank began to wait."""
    connect = zmq.Socket.connect

    def interrupted(socket: Any, endpoint: str) -> Any:
        connect(socket, endpoint)
        time.sleep(0.3)  # the scheduler's choice; the connection is made meanwhile

    with serving(address) as endpoint:
        monkeypatch.setattr(zmq.Socket, "connect", interrupted)
        client = Client(endpoint, "secret", name="sampler", timeout=3)
        assert client.call("touch", Path, Path("/a")) == Path("/a/x")
        client.close()


class Geometry:
    """An interface."""

    def double(self, point: Point, times: int = 2) -> Point: ...

    def refuse(self) -> None: ...


def test_an_interface_is_called_by_its_names_and_types(address: str) -> None:
    with serving(address) as endpoint:
        client = Client(endpoint, "secret", name="sampler", timeout=20)
        calls = remote_calls(Geometry, client.call)
        assert calls.keys() == {"double", "refuse"}
        for answer in (calls["double"](Point(np.ones(1))), calls["double"](times=2, point=Point(np.ones(1)))):
            assert isinstance(answer, Point)
            assert answer.place == [2.0]
        with pytest.raises(UserError, match=r"^set evaluation.data$"):
            calls["refuse"]()
        with pytest.raises(TypeError, match="unexpected keyword argument 'factor'"):
            calls["double"](Point(np.ones(1)), factor=2)
        client.close()


def test_a_server_has_the_methods_of_its_interface() -> None:
    """A client sends positions and decodes results: names, order and result must be the same."""

    async def addresses() -> list[str]:
        return []

    methods = methods_of(SamplerRequests, Sampler, addresses=addresses)
    assert len(methods) > 1
    for name, method in methods.items():
        if name != "addresses":
            signature, expected = inspect.signature(method), inspect.signature(getattr(SamplerRequests, name))
            assert list(signature.parameters) == list(expected.parameters), name
            assert signature.return_annotation == expected.return_annotation, name


def test_a_client_does_not_close_the_object() -> None:
    assert "score" in methods_of(Worker, Worker)
    assert "close" not in methods_of(Worker, Worker)


def test_many_requests_at_a_time(address: str) -> None:
    async def scene() -> None:
        client = AsyncClient(endpoint, "secret")
        waiting = asyncio.create_task(client.call("wait", None))
        calls = [client.call("double", Point, Point(np.array([i])), 3) for i in range(50)]
        assert [int(p.place[0]) for p in await asyncio.gather(*calls)] == [3 * i for i in range(50)]
        client.fail(RuntimeError("it died"))
        with pytest.raises(RuntimeError, match="it died"):
            await waiting
        client.close()

    with serving(address) as endpoint:
        asyncio.run(scene())


def test_only_who_knows_the_token_gets_in(address: str) -> None:
    with serving(address) as endpoint:
        with pytest.raises(RuntimeError, match=r"the sampler at .* rejected the token"):
            Client(endpoint, "wrong", name="sampler", timeout=20)
        # Neither without keys, nor with the server's public key and keys of one's own.
        for keys in (None, zmq.curve_keypair()):
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                if keys:
                    stranger.curve_publickey, stranger.curve_secretkey = keys
                    stranger.curve_serverkey = public_key_of_server("secret")
                stranger.connect(endpoint)
                stranger.send_multipart([b"1", b"touch", encode([Path("/a")])])
                assert not stranger.poll(500)
        client = Client(endpoint, "secret", name="sampler", timeout=20)  # it still serves others
        assert client.call("touch", Path, Path("/a")) == Path("/a/x")
        client.close()


def public_key_of_server(token: str) -> bytes:
    from rpg_megatron.system.socket_keys import derive_keys

    return derive_keys(token, "server").public


def test_nobody_there_and_a_server_that_dies(address: str) -> None:
    with pytest.raises(RuntimeError, match=r"no sampler answers at ipc:.*; see its log"):
        Client(address, "secret", name="sampler", timeout=0.3)
    with serving(address) as endpoint:
        client = Client(endpoint, "secret", name="sampler", timeout=20)
        WAITING.clear()
        call = Caller(client)
        assert WAITING.wait(20)
    call.join()
    with pytest.raises(RuntimeError, match=r"the sampler has ended \(while waiting for wait\); see its log"):
        raise call.error
    client.close()


class Caller(threading.Thread):
    """Calls ``wait`` in a thread and keeps the exception."""

    def __init__(self, client: Client, method: str = "wait", *arguments: Any):
        super().__init__()
        self.client, self.method, self.arguments = client, method, arguments
        self.error: Any = None
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.client.call(self.method, Path, *self.arguments)
        except Exception as e:
            self.error = e


def test_a_request_is_sent_again_to_the_successor(address: str) -> None:
    with serving(address):
        client = Client(address, "secret", name="worker", timeout=20, reconnect=True)
    call = Caller(client, "touch", Path("/a"))
    time.sleep(0.3)
    assert call.is_alive()
    with serving(address):
        call.join(20)
    assert call.answer == Path("/a/x")
    client.close()


def test_who_waits_can_be_interrupted(address: str) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with serving(address) as endpoint:
        client = Client(endpoint, "secret", name="sampler", timeout=20, while_waiting=stop)
        with pytest.raises(Stop):
            client.call("wait", None)
        client.close()


def test_nothing_but_data_is_decoded() -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        encode({"f": print})
    import msgspec

    objects = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("|O", b"\0" * 8, (1,)))))
    with pytest.raises(ValueError, match="extension 1 of type"):
        decode(objects, NDArray[np.float64])

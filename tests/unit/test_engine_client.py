"""Client and events, without vLLM.

Why: whatever an engine answers, the run must get the log-probs of the sampled tokens or one clear message
that names the engine. Not covered: that vLLM answers in this form (the integration test).
"""

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from aiohttp import web

from rpg_megatron.bridge.vllm.generate_route import SampledBytes
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.engine.client import EngineClient, EngineError, Sample
from rpg_megatron.system.events import EventSender


class Request(NamedTuple):
    """A request as the server received it."""

    path: str
    token: str
    body: Any


class Response:
    """The server's answer."""

    def __init__(self, status: int = 200, content: bytes = b"", json: Any = None):
        self.status = status
        self.content = content if json is None else msgspec.json.encode(json)


Handler = Callable[[Request], Response]


def generate(handler: Handler, experts: ExpertShape | None = None, **changes: Any) -> list[Sample]:
    """Generate from a real server on a socket."""
    ended = asyncio.Event()

    async def serve(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        try:
            response = handler(Request(request.path, request.headers["authorization"], body))
        except TimeoutError:
            await ended.wait()
            raise
        except ConnectionError:
            request.transport.close()
            raise
        return web.Response(status=response.status, body=response.content)

    async def run(socket: Path) -> list[Sample]:
        app = web.Application()
        app.router.add_post("/{path:.*}", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        if handler is not refuse:
            await web.UnixSite(runner, str(socket)).start()
        timeout = 1 if handler is hang else 60
        client = EngineClient(3, socket, "secret", timeout=timeout, experts=experts)
        sampling = {"n": 1, "max_tokens": 8, "temperature": 0.7, "seed": 5, "stop_token_ids": [9]} | changes
        try:
            return await client.generate(np.array([1, 2], np.int32), **sampling)
        finally:
            await client.close()
            ended.set()
            await runner.cleanup()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder) / "s"))


def packed(*choices: tuple[int, list[int], list[float], str]) -> Handler:
    samples = [
        SampledBytes(i, finish, np.array(tokens, np.int32).tobytes(), np.array(values, np.float32).tobytes())
        for i, tokens, values, finish in choices
    ]
    return lambda _: Response(content=msgspec.msgpack.encode(samples))


def test_request_and_answer() -> None:
    received = {}

    def handler(request: Request) -> Response:
        received["path"], received["token"] = request.path, request.token
        received["body"] = request.body
        return packed((1, [7], [-1.5], "length"), (0, [5, 9], [-0.25, -2.0], "stop"))(request)

    samples = generate(handler, n=2)
    assert received["path"] == "/inference/v1/generate/bytes"
    assert received["token"] == "Bearer secret"
    assert received["body"]["token_ids"] == [1, 2]
    sampling = received["body"]["sampling_params"]
    assert (sampling["n"], sampling["seed"], sampling["temperature"], sampling["max_tokens"]) == (
        2,
        5,
        0.7,
        8,
    )
    assert sampling["stop_token_ids"] == [9]
    assert not {"top_k", "min_p", "stop"} & set(sampling)
    assert sampling["logprobs"] == 0
    assert [s.tokens.tolist() for s in samples] == [[5, 9], [7]]  # by index
    assert [s.logprobs.tolist() for s in samples] == [[-0.25, -2.0], [-1.5]]
    assert [s.finish for s in samples] == ["stop", "length"]
    assert {(s.tokens.dtype.name, s.logprobs.dtype.name, s.tokens.flags.writeable) for s in samples} == {
        ("int32", "float32", True)
    }
    (unscored,) = generate(packed((0, [5], [], "stop")), logprobs=False)
    assert (unscored.tokens.tolist(), len(unscored.logprobs)) == ([5], 0)


def refuse(request: Request) -> Response:
    raise AssertionError("nobody listens")


def hang(request: Request) -> Response:
    raise TimeoutError


def break_off(request: Request) -> Response:
    raise ConnectionError


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refuse, "does not listen on its socket"),
        (hang, "did not answer /inference/v1/generate/bytes within 1 s"),
        (break_off, "aborted /inference/v1/generate/bytes (ServerDisconnectedError"),
        (
            lambda _: Response(500, json={"error": {"message": "EngineCore died"}}),
            "bytes with status 500: EngineCore died",
        ),
        (lambda _: Response(503, content=b"busy"), "status 503: busy"),
        (lambda _: Response(404, content=b"Not Found"), "bytes with status 404: Not Found"),
        (lambda _: Response(content=b"<html>"), "cannot be parsed"),
        (lambda _: Response(content=b"{}"), "cannot be parsed"),
        (lambda _: Response(content=msgspec.msgpack.encode([[0, "stop", b"123", b""]])), "parsed"),
        (packed((0, [5, 6], [-1.0], "stop")), "returned 1 log-probs of 2 tokens"),
        (packed((0, [5], [], "stop")), "returned 0 log-probs of 1 tokens"),
        (packed((0, [5], [float("nan")], "stop")), "missing or not finite"),
        (packed((0, [5], [float("-inf")], "stop")), "missing or not finite"),
        (packed((0, [5], [-1.0], "abort")), "ended a response with 'abort' after 1 tokens"),
        (packed(), "returned 0 responses instead of 1"),
    ],
)
def test_every_failure_names_the_engine(handler: Handler, message: str) -> None:
    with pytest.raises(EngineError) as error:
        generate(handler)
    assert str(error.value).startswith("engine 3 ")
    assert message in str(error.value)


def test_routes_of_experts() -> None:
    """The prompt has two tokens; the routes of its first are left out."""
    routes = np.array([[[0, 0], [1, 2]], [[0, 0], [3, 0]]], np.uint8)
    starts = []

    def handler(request: Request) -> Response:
        starts.append(request.body["sampling_params"].get("routed_experts_prompt_start"))
        tokens, values = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
        encoded = SampledBytes(
            0, "stop", tokens.tobytes(), values.tobytes(), None, routes.tobytes(), routes.shape
        )
        return Response(content=msgspec.msgpack.encode([encoded]))

    experts = ExpertShape(4, 2, 64, True, (1,))
    (sample,) = generate(handler, experts, routes_from=1)
    assert sample.routes.tolist() == [[[1, 2]], [[3, 0]]]
    (plain,) = generate(handler)
    assert len(plain.routes) == 0
    assert starts == [1, None]
    routes[1, 1] = 0
    with pytest.raises(EngineError, match=r"engine 3 returned routes with an expert twice .* set training"):
        generate(handler, experts, routes_from=1)
    with pytest.raises(EngineError, match=r"engine 3 returned routes of shape \(2, 2, 2\) for 3 tokens"):
        generate(handler, experts)


# -- events --------------------------------------------------------------------------------------------------


def test_events_arrive_and_never_hurt(tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    sender = EventSender(path)
    sender.phase("rollout", 0, 3)  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as display:
        display.bind(str(path))
        display.settimeout(5)
        sender.phase("rollout", 1, 3)
        assert json.loads(display.recv(4096)) == {"kind": "phase", "name": "rollout", "done": 1, "total": 3}
        for i in range(5000):  # more than the queue holds: dropped, not waited for
            sender.phase("rollout", i, 5000)
        sender.send({"kind": "x" * 10_000_000})
    sender.phase("rollout", 2, 3)  # the display is gone
    sender.close()
    sender.phase("rollout", 3, 3)

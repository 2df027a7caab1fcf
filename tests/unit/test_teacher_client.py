"""A teacher's server is asked with token ids, and what it cannot answer is one failure of one response.

Why: a shifted log-prob, or that of another token, distils noise; a server that dies must not end the night,
and its answer must not take the memory. Proved against an HTTP server of aiohttp, in vLLM's form: the
log-probs are those of the given tokens at their places, requests are limited in number, retried, and bounded
in time and size; wrong answers of every kind are one message without the server's text; the check before a
run names a server that is not there, has another tokenizer, or gives no log-probs. With a vLLM server:
tests/integration/test_distillation_runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.teacher import TeacherSettings
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.launcher.teacher_checks import check_teacher_server, check_tokenizers
from rpg_megatron.rollout import teacher_client
from rpg_megatron.rollout.teacher_client import TeacherClient
from rpg_megatron.system.http_client import ServerError
from tests.support.chat_models import write_chat_tokenizer
from tests.support.trajectories import make_trajectory

PROMPT, RESPONSE = [3, 1, 4], [1, 5, 9, 2]


def logprob(place: int, token: int) -> float:
    return -0.01 * place - 0.1 * token


def rows_of(tokens: list[int]) -> list[Any]:
    """As vLLM: nothing for the first token; the token, and perhaps a likelier one."""
    rows: list[Any] = [None]
    for place, token in enumerate(tokens[1:], 1):
        row = {str(token): {"logprob": logprob(place, token), "rank": 2, "decoded_token": "x"}}
        rows.append({"7777": {"logprob": -0.001, "rank": 1, "decoded_token": "y"}, **row})
    return rows


class Server:
    """Answers as vLLM does, or as a test says. answer: of the request's body, and its number from 1."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.most = self._running = 0
        self.answer: Callable[[dict[str, Any], int], Any] = lambda body, number: {
            "choices": [{"prompt_logprobs": rows_of(body["prompt"])}]
        }
        self.tokenizer: Any = None

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        self.keys.add(request.headers.get("Authorization", ""))
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0.02)
        self._running -= 1
        answer = self.answer(body, number)
        if isinstance(answer, int):
            return web.Response(status=answer, text="the secret of the server")
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.tokenizer is None:
            return web.Response(status=404)
        (ids,) = self.tokenizer([body["prompt"]], add_special_tokens=body["add_special_tokens"])["input_ids"]
        return web.json_response({"tokens": ids})


@contextmanager
def running_server() -> Iterator[Server]:
    server, loop = Server(), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/tokenize", server.tokenize)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(teacher_client, "_WAIT_SECONDS", 0.01)
    with running_server() as server:
        yield server


def sampled() -> Trajectory:
    return make_trajectory(PROMPT, RESPONSE)


def score(server: Server, *trajectories: Trajectory, **settings: Any) -> None:
    async def ask() -> None:
        client = TeacherClient(TeacherSettings(url=server.url, **settings), vocab=8000)
        try:
            await asyncio.gather(*map(client.score, trajectories))
        finally:
            await client.close()

    asyncio.run(ask())


def test_log_probs_are_those_of_the_tokens(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    t = sampled()
    score(server, t, api_key_variable="TEACHER_KEY")
    places = range(len(PROMPT), len(PROMPT) + len(RESPONSE))
    expected = [logprob(place, token) for place, token in zip(places, RESPONSE, strict=True)]
    np.testing.assert_allclose(t.anchor, expected, rtol=1e-6)
    assert t.anchor.dtype == np.float32
    (body,) = server.bodies
    assert body["prompt"] == PROMPT + RESPONSE, "ids, not text"
    assert body["model"] == "big"
    assert server.keys == {"Bearer secret"}


def test_the_likeliest_tokens_come_by_rank(server: Server) -> None:
    t = sampled()
    score(server, t, top_k=1)
    assert t.top_ids.tolist() == [[7777]] * len(RESPONSE)
    np.testing.assert_allclose(t.top_logps, [[-0.001]] * len(RESPONSE), rtol=1e-6)
    score(server, t, top_k=2)
    assert t.top_ids.tolist() == [[7777, token] for token in RESPONSE]
    assert [body["prompt_logprobs"] for body in server.bodies] == [1, 2]
    with pytest.raises(ServerError, match=r"gave fewer than 3 of the likeliest tokens \(teacher\.top_k\)"):
        score(server, sampled(), top_k=3)


def test_requests_are_limited_and_retried(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "_CONCURRENCY", 3)
    good = server.answer
    server.answer = lambda body, number: 503 if number in (1, 2, 5) else good(body, number)
    trajectories = [sampled() for _ in range(12)]
    score(server, *trajectories)
    assert all(len(t.anchor) == len(RESPONSE) for t in trajectories)
    assert server.most == 3
    assert len(server.bodies) == 15


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (500, "answered with status 500"),
        ("<html>", "answered with something else than JSON"),
        ({"choices": []}, "answered with something else than log-probs"),
        ({"choices": [{"prompt_logprobs": None}]}, "gives no prompt_logprobs"),
        ({"choices": [{"prompt_logprobs": rows_of([3, 1])}]}, "log-probs of 2 tokens, not 7"),
        ({"choices": [{"prompt_logprobs": rows_of([3, 1, 4, 1, 5, 9, 8])}]}, "something else than log-probs"),
        ("[" * 100_000, "something else than JSON"),
        ("x" * (3 << 20), "a far too long answer"),
        (
            '{"choices": [{"prompt_logprobs": ['
            + ", ".join(
                ["null", *(f'{{"{token}": {{"logprob": NaN}}}}' for token in (PROMPT + RESPONSE)[1:])]
            )
            + "]}]}",
            "a log-prob that is above 0 or not finite",
        ),
    ],
    ids=["status", "no JSON", "empty", "none", "too few", "another token", "nested", "too long", "NaN"],
)
def test_what_is_no_answer(server: Server, answer: Any, message: str) -> None:
    server.answer = lambda body, number: answer
    t = sampled()
    with pytest.raises(ServerError, match=message) as error:
        score(server, t)
    assert "secret" not in str(error.value)
    assert len(t.anchor) == 0
    assert len(server.bodies) == 3


def test_a_refused_request_is_not_repeated(server: Server) -> None:
    server.answer = lambda body, number: 401
    with pytest.raises(ServerError, match="answered with status 401"):
        score(server, sampled())
    assert len(server.bodies) == 1


def answer_with(**changed: Any) -> dict[str, Any]:
    """An answer in which the entry of the last token is changed, or its key."""
    rows = rows_of(PROMPT + RESPONSE)
    key = str(changed.pop("key", RESPONSE[-1]))
    rows[-1][str(RESPONSE[-1])] |= changed
    if key != str(RESPONSE[-1]):
        rows[-1] = {key: rows[-1].pop("7777"), **rows[-1]}
    return {"choices": [{"prompt_logprobs": rows}]}


NONE, WRONG = "above 0 or not finite", "something else than log-probs"


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logprob": 10**400}, WRONG),
        ({"logprob": -(10**400)}, WRONG),
        ({"logprob": 1e-3}, NONE),
        ({"logprob": 7}, NONE),
        ({"logprob": float("-inf")}, NONE),
        ({"logprob": -1e300}, NONE),  # is not finite in float32
        ({"logprob": "-1.5"}, WRONG),
        ({"logprob": False}, WRONG),
        ({"logprob": None}, WRONG),
        ({"logprob": [-1.0]}, WRONG),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_log_prob_that_is_none(server: Server, changed: Any, message: str, top_k: int | None) -> None:
    server.answer = lambda body, number: answer_with(**changed)
    t = sampled()
    with pytest.raises(ServerError, match=message):
        score(server, t, top_k=top_k)
    assert len(t.anchor) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": "2"}, WRONG),
        ({"rank": 1.5}, WRONG),
        ({"rank": 0}, WRONG),
        ({"rank": True}, WRONG),
        ({"rank": 10**400}, "fewer than 2 of the likeliest"),
        ({"key": 8000}, "gave token 8000, and the model has 8000 tokens"),
        ({"key": 2**40}, WRONG),
        ({"key": -1}, WRONG),
        ({"key": "07"}, WRONG),
        ({"key": "٣"}, WRONG),
        ({"key": "the"}, WRONG),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_likely_token_that_is_none(server: Server, changed: Any, message: str) -> None:
    server.answer = lambda body, number: answer_with(**changed)
    with pytest.raises(ServerError, match=message):
        score(server, sampled(), top_k=2)


def test_a_server_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "_REQUEST_SECONDS", 0.01)
    server.answer = lambda body, number: asyncio.run_coroutine_threadsafe  # never reached in time
    with pytest.raises(ServerError, match=r"did not answer within 0\.01 s"):
        score(server, sampled())


def settings_for(folder: Path, url: str) -> Settings:
    teacher, objective = {"url": url}, {"type": "distil"}
    raw = {"model": {"path": str(folder)}, "data": {"path": "x"}, "teacher": teacher, "objective": objective}
    return Settings.model_validate(raw | {"device": "cpu"})


def test_the_check_before_a_run(server: Server, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    write_chat_tokenizer(own, "qwen2.5")
    write_chat_tokenizer(other, "qwen2.5")
    settings = settings_for(own, server.url)
    assert "could not be compared" in check_teacher_server(settings)[0]
    server.tokenizer = open_tokenizer(own, chat=False)
    assert check_teacher_server(settings) == []
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|im_end|>"', '"<|im_over|>"'))
    server.tokenizer = open_tokenizer(other, chat=False)
    with pytest.raises(
        UserError, match=r"the tokenizer of http.* is not the policy's in .*own: token \d+ of"
    ):
        check_teacher_server(settings)
    with pytest.raises(UserError, match=r"the token '<\|im_end\|>' is \d+ here and none there"):
        check_tokenizers(own, other)
    check_tokenizers(own, own)
    server.answer = lambda body, number: {"choices": [{"text": "hello"}]}
    with pytest.raises(UserError, match=r"the server at http.* answered with something else than log-probs"):
        check_teacher_server(settings)
    with pytest.raises(
        UserError, match=r"cannot be reached: Connection refused; start it, or correct the settings"
    ):
        check_teacher_server(settings_for(own, "http://127.0.0.1:9/v1"))


def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UserError, match="the variable TEACHER_KEY is not set"):
        TeacherClient(TeacherSettings(url="http://x/v1", api_key_variable="TEACHER_KEY"))

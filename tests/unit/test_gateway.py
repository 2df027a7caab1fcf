"""The gateway: chats and token ids of any client become rows with exactly the tokens that were sampled.

Why: a turn whose history was encoded again is trained on tokens that no policy sampled, and no metric shows
it. Random clients with tools, against templates that write chats as Qwen2.5, Qwen3 (which leaves out earlier
thinking) and Llama 3 do, through the real server and vLLM's parsers of tool calls; the engine is a stand-in
that often samples another encoding of a text than the tokenizer's. Not covered: real engines.
"""

import asyncio
import contextlib
import json
import os
import random
import select
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import jinja2
import msgspec
import numpy as np
import pytest

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.data.prompts import TextCodec, codec_of, load_tokenizer, save_chat_template
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import Sample
from rpg_megatron.engine.tool_calls import ToolCall, _is_plain
from rpg_megatron.rollout.episode import EpisodeTask
from rpg_megatron.rollout.episode_pool import LocalEpisode
from rpg_megatron.rollout.gateway import CHAT
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.rollout.worker import Worker
from tests.support import episodes
from tests.support.chat_models import PARSERS, TEMPLATES, write_chat_tokenizer
from tests.support.ranks import ROOT

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = {
    "qwen2.5": '<tool_call>{"name":"add",  "arguments": {"a": %d}}</tool_call>',
    "qwen3": '<tool_call>\n{"arguments": {"a": %d}, "name": "add"}\n</tool_call>',
    "llama3": '{"name": "add",  "parameters": {"a":%d}}',
}
"""Written in another way than the templates do."""
BROKEN = {"qwen2.5": '<tool_call>{"name": "add"', "qwen3": "<tool_call>add(1)</tool_call>", "llama3": '{"na'}
Client = Callable[[EpisodeTask], Awaitable[float]]


class Engine:
    """Samples sentences, thinking and tool calls, in encodings of its own, drawn from prompt and seed."""

    def __init__(self, family: str, codec: TextCodec, stop: int):
        self.family, self.codec, self.stop = family, codec, stop
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and sampled tokens."""

    async def generate(self, prompt: Any, *, n: int, **request: Any) -> list[Sample]:
        return [self.one(prompt.tolist(), request["seed"] + i, request["max_tokens"]) for i in range(n)]

    def one(self, prompt: list[int], seed: int, most: int) -> Sample:
        draw = random.Random(f"{prompt} {seed}")
        text = draw.choice(["the answer is seven", " there are more numbers ", "\nüber 数", "seven.\n"])
        kind = draw.random()
        if kind < 0.3:
            text = ("" if self.family == "llama3" else text) + CALLS[self.family] % draw.randrange(99)
        elif kind < 0.4:
            text = BROKEN[self.family]
        if self.family == "qwen3" and draw.random() < 0.7:
            text = f"<think>\nthat is {draw.randrange(99)}\n</think>\n\n{text}"
        tokens = []
        for part in text.split("e"):  # cut where the tokenizer would not
            tokens += [*self.codec.encode(part), *self.codec.encode("e")]
        tokens = [*tokens[:-1], self.stop][:most] if draw.random() < 0.9 else tokens[:4]
        self.turns.append((prompt, tokens))
        values = np.array([-draw.random() for _ in tokens], np.float32)
        return Sample(np.array(tokens, np.int32), values, "stop" if tokens[-1] == self.stop else "length")


class Run:
    """A worker with a gateway, and its stand-in engine."""

    def __init__(self, config_file: Path, folder: Path, family: str, *, tools: bool = True, most: int = 2000):
        settings = load_settings(config_file)
        shape = json.loads((settings.model.path / "config.json").read_text())
        write_chat_tokenizer(folder / "model", family)
        (folder / "model" / "config.json").write_text(json.dumps(shape | {"vocab_size": 400}))
        keys = [f"model.path={folder / 'model'}", "rollout.episode=tests.support.episodes:client_chat"]
        keys += [f"rollout.tool_call_parser={PARSERS[family]}"] if tools else []
        self.settings: Settings = load_settings(config_file, keys)
        self.tokenizer = load_tokenizer(folder / "model")
        self.codec = codec_of(self.tokenizer)
        save_chat_template(self.tokenizer, self.settings.data, folder / CHAT)
        self.stops = stop_tokens(folder / "model", self.tokenizer)
        self.engine = Engine(family, self.codec, self.tokenizer.eos_token_id)
        self.folder, self.most = folder, most
        self.counts: dict[str, float] = {}

    def sample(self, client: Client, samples: int = 1, after: Client | None = None) -> list[Trajectory]:
        """The rows of a group whose responses a client samples. after: called when its episode has ended."""
        prompt = np.array(self.codec.encode("the answer"), np.int32)
        group = GroupTask(7, 0, prompt, "2", samples=samples, seed=1000, max_tokens=self.most, version=5)
        tasks: list[EpisodeTask] = []

        async def first(task: EpisodeTask) -> float:
            tasks.append(task)
            return await client(task)

        async def run() -> list[Trajectory]:
            engines: Any = [self.engine]
            here = LocalEpisode(episodes.client_chat, self.settings.rollout.episode)
            worker = Worker(self.settings, self.codec, engines, self.folder, self.stops, here)
            episodes.client = first
            try:
                async with asyncio.timeout(300):
                    assert (await worker.generate(group, 0, 0)).complete
                    scores = await worker.score(7)
                    rows = len(scores.rows) or samples
                    if after is not None:
                        await after(tasks[0])
                    fetched = await worker.fetch([7] * rows, list(range(rows)))
                    parts = {t.sample: t.parts for t in fetched}.values()
                    names = ("env/retokenized", "env/unparsed_calls", "env/undelivered")
                    self.counts = {name: sum(p[name] for p in parts) for name in names}
                    return fetched
            finally:
                worker.close()

        return asyncio.run(run())


async def post(task: EpisodeTask, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
    url = task.base_url.removesuffix("/v1") + path if path.startswith("/inference") else task.base_url + path
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def random_chat(changes: list[str]) -> Client:
    """Questions and results of tools. Appends what it does to the history: edits it, or asks once more."""

    async def client(task: EpisodeTask) -> float:
        draw, thinks = random.Random(task.seed), False
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": draw.choice(["seven?", " more\n", "ü"])}
        ]
        for _ in range(draw.randrange(1, 6)):
            status, answer = await post(task, {"messages": messages, "tools": [ADD]})
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            action = draw.random()
            if action < 0.1:
                changes.append("edited" if action < 0.05 else "asked once more")
                if action >= 0.05:
                    continue
                message["content"] += " and more"
            thinks = thinks or "reasoning_content" in message
            messages = [*messages, message]
            for call in message.get("tool_calls", []):
                result = str(json.loads(call["function"]["arguments"])["a"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if "tool_calls" not in message:
                messages.append({"role": "user", "content": draw.choice(["why?", "numbers", " the "])})
                changes.extend(["thought"] * thinks)
                thinks = False
        return 1.0

    return client


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_rows_are_what_the_engine_was_given_and_sampled(
    config_file: Path, tmp_path: Path, family: str, count: int
) -> None:
    """Tool calls are parsed in the long test: importing vLLM takes 20 s."""
    run = Run(config_file, tmp_path, family, tools=count > 40)
    changes: list[str] = []
    rows = run.sample(random_chat(changes), count)
    assert len({t.sample for t in rows}) == count
    turns = [(len(p), (*p, *sampled)) for p, sampled in run.engine.turns]
    assert sum(t.sampled for t in rows) == sum(len(whole) - n for n, whole in turns)
    found = 0
    for t in rows:
        whole = (*t.prompt.tolist(), *t.response.tolist())
        sampled = [False] * len(t.prompt) + t.mask.tolist()
        ends = [i for i in range(1, len(whole) + 1) if sampled[i - 1] and not any(sampled[i : i + 1])]
        for end in ends:
            start = max(i for i in range(end) if not sampled[i]) + 1
            assert (start, whole[:end]) in turns
            found += 1
    # Two turns with nothing between them are one part of the mask.
    assert found >= len(turns) * 0.98
    branches = len(rows) - count
    print(f"{family}: {len(turns)} turns in {len(rows)} rows of {count} responses; {run.counts}")
    assert run.counts["env/retokenized"] == 0
    assert (run.counts["env/unparsed_calls"] > 0) == (count > 40)
    assert (family == "qwen3") == ("thought" in changes)
    assert 0 < branches <= len(changes)


def test_prompts_have_the_thoughts_that_the_template_writes(config_file: Path, tmp_path: Path) -> None:
    """Of clients that drop ``reasoning_content``, or send it: each prompt is the template's text of the chat
    with all that was thought, or of what a client has edited; never a mixture.
    """
    run = Run(config_file, tmp_path, "qwen3", tools=False, most=5000)
    chats: list[tuple[list[dict[str, Any]], list[int]]] = []

    def one(prompt: list[int], seed: int, most: int) -> Sample:
        draw = random.Random(f"{prompt} {seed}")
        text = draw.choice(["the answer is seven", "there are more"])
        thoughts = draw.choice(["", "seven", "that is 7"])
        text = f"<think>\n{thoughts}\n</think>\n\n{text}" if draw.random() < 0.7 else text
        tokens = [*run.codec.encode(text), run.engine.stop]
        run.engine.turns.append((prompt, tokens))
        return Sample(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop")

    run.engine.one = one  # type: ignore[method-assign]

    async def client(task: EpisodeTask) -> float:
        draw = random.Random(task.seed)
        drops, sent = draw.random() < 0.7, [dict(QUESTION[0])]
        thought = [dict(QUESTION[0])]
        for _ in range(7):
            status, answer = await post(task, {"messages": sent, "return_token_ids": True})
            assert status == 200, answer
            chats.append(([*thought], answer["prompt_token_ids"]))
            message = answer["choices"][0]["message"]
            thought.append(message)
            kept = ("role", "content") if drops else tuple(message)
            sent.append({key: message[key] for key in kept})
            for messages in (thought, sent):
                messages.append({"role": draw.choice(["user", "tool", "tool"]), "content": "more"})
            thought[-1] = sent[-1]
        return 1.0

    run.sample(client, 40)
    write = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES["qwen3"])
    mixtures = []
    for chat, prompt in chats:
        plain = [message | {"content": message["content"] or ""} for message in chat]
        expected = write.render(messages=plain, add_generation_prompt=True)
        # The template gives the last turn empty thoughts, which a sampled one need not have.
        texts = [
            text.replace("<think>\n\n</think>\n\n", "") for text in (expected, run.codec.decode_all(prompt))
        ]
        mixtures += [texts] if texts[0] != texts[1] else []
    assert mixtures == []
    assert len(chats) == 280


def test_a_template_without_tools_is_refused(config_file: Path, tmp_path: Path) -> None:
    """The policy would not know of them. A template of its own for tools is used where there are some."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    plain = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}answer:"
    for_tools = "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}answer:"
    answers: list[Any] = []

    async def client(task: EpisodeTask) -> float:
        for tools in ([ADD], []):
            answers.append(await post(task, {"messages": QUESTION, "tools": tools, "return_token_ids": True}))
        return 1.0

    (run.folder / CHAT).write_text(json.dumps([plain, {}, plain]))
    run.sample(client)
    (run.folder / CHAT).write_text(json.dumps([plain, {}, for_tools]))
    run.sample(client)
    (refused, error), *written = answers
    assert (refused, [status for status, _ in written]) == (400, [200] * 3)
    assert error["error"]["message"].startswith("tools: the model's chat template does not read them")
    prompts = [run.codec.decode_all(answer["prompt_token_ids"]) for _, answer in written]
    assert prompts == ["user:seven?answer:", "addseven?answer:", "user:seven?answer:"]


@pytest.mark.parametrize("tools", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_agent_of_the_documentation(config_file: Path, tmp_path: Path, tools: bool) -> None:
    """It uses OpenAI's client, and its turns are one row."""
    page = (ROOT / "docs" / "environments.md").read_text()
    code: dict[str, Any] = {}
    exec(page.split("```python\n# my_agent.py\n")[1].split("```")[0], code)
    run = Run(config_file, tmp_path, "qwen2.5", tools=tools)
    texts = []

    async def client(task: EpisodeTask) -> float:
        texts.append(await code["agent"](task.base_url, task.api_key, "seven?"))
        return 1.0

    rows = run.sample(client, 20)
    assert [t.sample for t in rows] == list(range(20))  # no branch
    assert sum(t.sampled for t in rows) == sum(len(sampled) for _, sampled in run.engine.turns)
    assert (len(run.engine.turns) > 20) == tools
    assert "the answer is seven" in texts


QUESTION = [{"role": "user", "content": "seven?"}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages: a list of at least one message is needed"),
    ({"messages": [{"role": "robot"}]}, "messages[0]: an object with a role of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is possible"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "calls of functions with name"),
    ({"messages": QUESTION, "temperature": 0.2}, "temperature: 0.2 is not possible; the run has 1.0"),
    ({"messages": QUESTION, "top_p": 0.9}, "top_p: 0.9 is not possible"),
    ({"messages": QUESTION, "n": 2}, "n: 2 is not possible; the run has 1"),
    ({"messages": QUESTION, "stream": True}, "stream: True is not possible"),
    ({"messages": QUESTION, "stop": ["x"]}, "stop: the gateway has no such field"),
    ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice: 'required' is not possible"),
    ({"messages": QUESTION, "tools": [{"type": "function"}]}, "tools: a list of functions"),
    ({"messages": QUESTION, "tools": 3}, "tools: a list of functions with a name is needed"),
    ({"messages": QUESTION, "max_tokens": 0}, "max_tokens: 0 is no number of tokens"),
    ({"token_ids": [3, 10**9]}, "token 1000000000; the model has 400 tokens"),
    ({"token_ids": []}, "without tokens"),
    ({"token_ids": "ab"}, "token_ids: a list of integers from 0"),
    ({"token_ids": [3, -1]}, "token_ids: a list of integers from 0"),
    ({"token_ids": [3, 2**40]}, "token_ids: a list of integers from 0"),
    ({"token_ids": [3], "sampling_params": {"temperature": 0.5}}, "temperature: 0.5 is not possible"),
    ({"token_ids": [3], "sampling_params": {"stop_token_ids": [5]}}, "stop_token_ids: 5 ends no turn"),
    ({"token_ids": [3], "sampling_params": {"stop_token_ids": [[5]]}}, "stop_token_ids: [5] ends no turn"),
    ({"token_ids": [3], "sampling_params": {"stop_token_ids": 5}}, "stop_token_ids: a list is needed"),
    ({"token_ids": [3], "sampling_params": 4}, "sampling_params: an object is needed"),
]


def test_what_the_gateway_refuses(config_file: Path, tmp_path: Path) -> None:
    """Also: wrong keys, text that is no JSON, and that all of it leaves no trace in the response."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    answers: list[tuple[int, str]] = []

    async def client(task: EpisodeTask) -> float:
        for body, _ in REFUSED:
            route = "/inference/v1/generate" if "token_ids" in body else "/chat/completions"
            status, answer = await post(task, body, route)
            answers.append((status, answer["error"]["message"]))
        url = task.base_url + "/chat/completions"
        async with aiohttp.ClientSession() as http:
            for key, text, expected in (("", "{}", 401), ("x", "{}", 401), (task.api_key, "{", 400)):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(url, data=text, headers=headers) as answer:
                    assert answer.status == expected
        status, _ = await post(task, {"messages": QUESTION})
        assert status == 200
        return 1.0

    (row,) = run.sample(client)
    assert {status for status, _ in answers} == {400}
    for (_, message), (_, part) in zip(answers, REFUSED, strict=True):
        assert part in message, message
    ((prompt, sampled),) = run.engine.turns
    assert (row.prompt.tolist(), row.response.tolist()) == (prompt, sampled)


def test_a_client_gets_no_500(config_file: Path, tmp_path: Path) -> None:
    """Whatever it sends: an error of a client is a 4xx with a JSON object, and leaves no trace."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    deep = "[" * 200_000
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    first = [{"role": "assistant", "content": "x", "tool_calls": [call]}, *QUESTION]
    large: list[Any] = [
        [],
        {},
        2**64,
        -(2**63) - 1,
        10**400,
        1e308,
        "\ud800",
        deep,
        True,
        None,
        [[{}]],
        {"role": []},
    ]
    bodies = [json.dumps(body) for body in (
        {"messages": [{"role": []}]}, {"messages": [{"role": {}}]},
        {"messages": [{"role": "user", "content": 2**65}]},
        {"messages": QUESTION, "seed": 2**70}, {"messages": QUESTION, "max_tokens": 2**70},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 2**70, "arguments": 1}}]}]},
        {"messages": [{"role": "tool", "tool_calls": [deep]}]}, {"token_ids": [2**70]},
        {"messages": QUESTION, "tools": [{"function": {"name": 3}}]},
        {"messages": QUESTION, "user": 10**4000},
    )]  # fmt: skip
    nested = {"function": {"name": "add", "arguments": deep}}
    bodies += [json.dumps({"messages": [{"role": "assistant", "tool_calls": [nested]}, *QUESTION]})]
    bodies += [deep, '{"messages": ' + deep, "1" * 100_000, '"\\ud800"', "\ufeff{}", "", "null", "NaN"]
    draw = random.Random(int(os.environ.get("RPG_FUZZ_SEED", "0")))
    for _ in range(300):
        body: Any = {"messages": json.loads(json.dumps(first)), "tools": [json.loads(json.dumps(ADD))]}
        if draw.random() < 0.3:
            body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 3}, "messages": []}
        at: Any = body
        while draw.random() < 0.8:  # a value at a random place
            inner = [
                v for v in (at.values() if isinstance(at, dict) else at) if isinstance(v, dict | list) and v
            ]
            if not inner:
                break
            at = draw.choice(inner)
        keys = [*at] if isinstance(at, dict) else range(len(at))
        at[draw.choice(list(keys))] = draw.choice(large)
        text = json.dumps(body)
        bodies.append(text if draw.random() < 0.9 else text[: draw.randrange(len(text))])
    statuses: list[int] = []

    async def client(task: EpisodeTask) -> float:
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        root = task.base_url.removesuffix("/v1")
        async with aiohttp.ClientSession(headers=headers) as http:
            for text in bodies:
                path = "/inference/v1/generate" if "token_ids" in text else "/v1/chat/completions"
                async with http.post(root + path, data=text.encode()) as answer:
                    statuses.append(answer.status)
                    assert answer.status < 500, text[:300]
                    assert (answer.status == 200) == ("error" not in await answer.json()), text[:300]
            for path in ("/", "/v1/other"):
                async with http.post(root + path, data="{}") as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (404, "invalid_request")
            packed = {"Content-Encoding": "gzip"}
            async with http.post(root + "/v1/chat/completions", data=b"x", headers=packed) as answer:
                assert answer.status == 400
        return 1.0

    rows = run.sample(client)
    assert set(statuses[:10]) == {400}
    assert sum(t.sampled for t in rows) == sum(len(sampled) for _, sampled in run.engine.turns)


def test_requests_that_cannot_fit_are_refused_at_once(config_file: Path, tmp_path: Path) -> None:
    """By their bytes, tools and messages; before they are rendered and encoded."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False, most=200)
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return run_encode(text)

    run_encode = run.codec.encode
    run.codec = run.codec._replace(encode=encode)

    async def client(task: EpisodeTask) -> float:
        codes = []
        for body in (
            {"messages": [{"role": "user", "content": "a" * (8 << 20)}]},
            {"messages": [{"role": "user", "content": "a" * 100_000}]},
            {"messages": QUESTION, "tools": [ADD] * 20_000},
            {"messages": QUESTION * 1000},
            {"token_ids": [3] * 10_000},
        ):
            path = "/inference/v1/generate" if "token_ids" in body else "/chat/completions"
            status, answer = await post(task, body, path)
            codes.append((status, answer["error"]["code"]))
        assert codes == [(400, "context_length_exceeded")] * 5
        status, _ = await post(task, {"messages": QUESTION})
        assert status == 200
        return 1.0

    (row,) = run.sample(client)
    assert row.finish == "stop" or len(row.response)
    assert max(encoded) < 1000


def test_a_response_has_one_body_in_memory(config_file: Path, tmp_path: Path) -> None:
    """The bodies of others with its key wait in their connections."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    held, answer = asyncio.Event(), run.engine.generate
    waiting = asyncio.Event()

    async def slow(prompt: Any, **request: Any) -> list[Sample]:
        waiting.set()
        await held.wait()
        return await answer(prompt, **request)

    run.engine.generate = slow  # type: ignore[method-assign]

    async def client(task: EpisodeTask) -> float:
        first = asyncio.create_task(post(task, {"messages": QUESTION}))
        await waiting.wait()
        url, key = urlsplit(task.base_url), f"Authorization: Bearer {task.api_key}\r\n"
        sent = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.transport.set_write_buffer_limits(0)
            size = 20 << 20
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{key}Content-Length: {size}\r\n\r\n"
            writer.write(head.encode())
            writer.write(b" " * size)
            sent.append((reader, writer))
        await asyncio.sleep(0.5)
        left = [writer.transport.get_write_buffer_size() for _, writer in sent]
        assert min(left) > 10 << 20, "most of it is in the client"
        for _, writer in sent:
            writer.transport.abort()
        held.set()
        assert (await first)[0] == 200
        return 1.0

    run.sample(client)


def test_connections_without_a_key_end(config_file, tmp_path, monkeypatch, caplog) -> None:
    """By their number and after a time, also if they send; and there is not a record for each."""
    monkeypatch.setattr("rpg_megatron.rollout.gateway_connections._SECONDS", 0.5)
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)

    async def client(task: EpisodeTask) -> float:
        url = urlsplit(task.base_url)
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.get(task.base_url + "/models") as answer:
                assert answer.status == 200
            opened = [await asyncio.open_connection(url.hostname, url.port) for _ in range(100)]
            for number, (_, writer) in enumerate(opened):
                writer.write(
                    [b"GET / HTTP/1.1\r\n", b"\0\0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"][number % 3]
                )
            for reader, writer in opened:  # each ends
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
            async with http.get(task.base_url + "/models") as answer:  # on the connection that has a key
                assert answer.status == 200
            assert len(http.connector._conns) == 1  # type: ignore[union-attr]
        await post(task, {"messages": QUESTION})
        return 1.0

    run.sample(client)
    assert len(caplog.records) < 5


def send_by_hand(task: EpisodeTask, route: str, body: Any) -> socket.socket:
    url, text = urlsplit(task.base_url), json.dumps(body)
    connection = socket.create_connection((url.hostname, url.port))
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {task.api_key}\r\n"
    connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    return connection


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize(
    "leaves", ["while it is sampled", "as it is sampled", "while it is made", "without reading it"]
)
def test_what_no_client_got_is_not_trained(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, leaves: str
) -> None:
    """The client asks again, as client libraries do: only that turn is in the response, and the loss is
    counted.
    """
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    answer, turns = run.engine.generate, 0
    asked, left = asyncio.Event(), asyncio.Event()
    connections: list[socket.socket] = []

    async def engine(prompt: Any, **request: Any) -> list[Sample]:
        nonlocal turns
        turns += 1
        samples = await answer(prompt, **request)
        if turns == 2:
            asked.set()
            if leaves == "while it is sampled":
                await left.wait()
            if leaves == "as it is sampled":  # before the event loop sees it
                connections[0].shutdown(socket.SHUT_RDWR)
        return samples

    run.engine.generate = engine  # type: ignore[method-assign]
    if leaves == "while it is made":
        make = msgspec.json.encode
        failing = iter([False, True])

        def encode(value: Any) -> bytes:
            if next(failing, False):
                raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
            return make(value)

        monkeypatch.setattr("rpg_megatron.rollout.gateway.msgspec.json.encode", encode)

    async def client(task: EpisodeTask) -> float:
        short = "/inference/v1/generate" if "inference" in route else "/chat/completions"
        body: Any = {"token_ids": [*task.prompt]} if "inference" in route else {"messages": QUESTION}
        status, first = await post(task, body, short)
        assert status == 200
        if "inference" in route:
            body = {"token_ids": [*task.prompt, *first["choices"][0]["token_ids"], 5]}
        else:
            body = {"messages": [*QUESTION, first["choices"][0]["message"], *QUESTION]}
        connections.append(connection := send_by_hand(task, route, body))
        await asked.wait()
        if leaves == "while it is made":
            assert b" 400 " in await asyncio.to_thread(connection.recv, 100)
        if leaves == "without reading it":
            await asyncio.to_thread(select.select, [connection], [], [])
        connection.close()
        await asyncio.sleep(0.2)
        left.set()
        status, _ = await post(task, body, short)
        assert status == 200
        return 1.0

    (row,) = run.sample(client)
    sampled = [tokens for _, tokens in run.engine.turns]
    assert row.sampled == len(sampled[0]) + len(sampled[-1])
    assert row.response.tolist()[-len(sampled[-1]) :] == sampled[-1]
    assert run.counts["env/undelivered"] == 1


SURROGATES = ['{"a": "\\ud83d"}', '{"\\udc00": 1}', '{"a": ["' + "\ud83d" + '"]}', "[" * 200_000]


def test_calls_that_no_client_can_read_are_none() -> None:
    assert [_is_plain(ToolCall("add", text)) for text in SURROGATES] == [False] * 4
    assert not _is_plain(ToolCall("a\ud83d", "{}"))
    fine = ['{"a": "\\ud83d\\ude00"}', '{"a": "ü 数"}', "{", "", '{"a": 1' + "0" * 5000 + "}", "[[1]]"]
    assert [_is_plain(ToolCall("add", text)) for text in fine] == [True] * 6


@pytest.mark.long
def test_half_a_character_in_a_call_is_told(config_file: Path, tmp_path: Path) -> None:
    """It stays in the text, is counted, and the chat goes on with the turn that was sampled."""
    run = Run(config_file, tmp_path, "qwen2.5")
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'

    def one(prompt: list[int], seed: int, most: int) -> Sample:
        tokens = [*run.codec.encode(call), run.engine.stop]
        run.engine.turns.append((prompt, tokens))
        return Sample(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop")

    run.engine.one = one  # type: ignore[method-assign]

    async def client(task: EpisodeTask) -> float:
        status, answer = await post(task, {"messages": QUESTION, "tools": [ADD]})
        message = answer["choices"][0]["message"]
        assert (status, message["content"], "tool_calls" in message) == (200, call, False)
        status, _ = await post(task, {"messages": [*QUESTION, message, *QUESTION], "tools": [ADD]})
        assert status == 200
        return 1.0

    (row,) = run.sample(client)
    assert row.sampled == sum(len(tokens) for _, tokens in run.engine.turns)
    assert (run.counts["env/unparsed_calls"], run.counts["env/undelivered"]) == (2, 0)


def test_token_ids_in_and_out(config_file: Path, tmp_path: Path) -> None:
    """Turns by tokens; the same text in other tokens is refused and counted."""
    run = Run(config_file, tmp_path, "llama3", tools=False)
    route, statuses = "/inference/v1/generate", []

    async def client(task: EpisodeTask) -> float:
        first = [*task.prompt]
        sampling = {"max_tokens": 50, "temperature": 1.0, "logprobs": 1, "stop_token_ids": run.stops}
        _, answer = await post(task, {"token_ids": first, "sampling_params": sampling}, route)
        (choice,) = answer["choices"]
        for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
            assert entry["token"] == f"token_id:{token}"
            assert entry["logprob"] < 0
        context = first + choice["token_ids"]
        added = run.codec.encode("why?")
        spelled = run.codec.encode(run.codec.decode_all(context) + "why?")
        assert spelled != context + added
        for tokens in (spelled, context + added, run.codec.encode("another")):
            status, _ = await post(task, {"token_ids": tokens}, route)
            statuses.append(status)
        return 1.0

    first, second = run.sample(client)
    assert statuses == [409, 200, 200]
    assert run.counts["env/retokenized"] == 1
    assert len(run.engine.turns) == 3
    assert first.sampled + second.sampled == sum(len(sampled) for _, sampled in run.engine.turns)


def test_a_response_without_room_is_refused(config_file: Path, tmp_path: Path) -> None:
    run = Run(config_file, tmp_path, "qwen2.5", tools=False, most=120)
    codes = []

    async def client(task: EpisodeTask) -> float:
        messages: list[Any] = [*QUESTION]
        for _ in range(20):
            status, answer = await post(task, {"messages": messages})
            if status != 200:
                codes.append((status, answer["error"]["code"]))
                break
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        return 0.0

    (row,) = run.sample(client)
    assert codes == [(400, "context_length_exceeded")]
    assert row.finish == "length"


def test_a_client_that_leaves_or_outlives_its_episode(config_file: Path, tmp_path: Path) -> None:
    """Its turn is not in the response, and its key ends with the episode."""
    run = Run(config_file, tmp_path, "qwen2.5", tools=False)
    answer = run.engine.generate
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def slow(prompt: Any, **request: Any) -> list[Sample]:
        if run.engine.turns:
            waiting.set()
            await ended.wait()
        return await answer(prompt, **request)

    run.engine.generate = slow  # type: ignore[method-assign]

    async def client(task: EpisodeTask) -> float:
        status, _ = await post(task, {"messages": QUESTION})
        assert status == 200
        request = asyncio.create_task(post(task, {"messages": [{"role": "user", "content": "left"}]}))
        await waiting.wait()
        request.cancel()
        await asyncio.wait([request])
        return 1.0

    async def after(task: EpisodeTask) -> float:
        ended.set()
        assert task.base_url.startswith("http://127.0.0.1:")
        status, refused = await post(task, {"messages": QUESTION})
        assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
        return 0.0

    (row,) = run.sample(client, after=after)
    (prompt, sampled), *_ = run.engine.turns
    assert (row.prompt.tolist(), row.response.tolist()) == (prompt, sampled)

"""The gateway: chats and token ids of any client become rows with exactly the tokens that were sampled.

Why: a turn whose history was encoded again is trained on tokens that no policy sampled, and no metric shows
it. Random clients with tools, against templates that write chats as Qwen2.5, Qwen3 (which leaves out earlier
thinking) and Llama 3 do, through the real server and vLLM's parsers of tool calls; the engine is a stand-in
that often samples another encoding of a text than the tokenizer's. Not covered: real engines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.data.prompts import TextCodec, codec_of, load_tokenizer, save_chat_template
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import Sample
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
                    names = ("env/retokenized", "env/unparsed_calls")
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

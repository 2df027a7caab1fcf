"""Episodes of verifiers, in its own virtual environment, with the example's taskset and its tool.

Why: another process, another library and a server of tools stand between a response and its reward; whatever
ends there must be told, and nothing of it may stay behind. The library, its MCP server and its interception
are real; the gateway and the policy are stand-ins. Skipped without ``make .venv-verifiers``. Not covered: a
real engine (test_tool_runs).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.data.custom_source import custom_rows
from rpg_megatron.environments import verifiers
from rpg_megatron.environments.verifiers import play, problems
from rpg_megatron.rollout.episode import Episode, EpisodeLost, EpisodeTask
from tests.support.launcher import wait_for
from tests.support.ranks import ROOT

VENV = ROOT / ".venv-verifiers"
pytestmark = pytest.mark.skipif(not (VENV / ".complete").exists(), reason="run make .venv-verifiers")
TASKSET = {"id": "calculator_products", "count": 24}
FAULTY = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    fault: str = ""


class FaultyTask(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fault == "reward":
            raise KeyError("no key")
        return 0.25

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return 7.0


class Config(vf.TasksetConfig):
    faults: list[str] = ["", "reward"]


class Faulty(vf.Taskset[FaultyTask, Config]):
    def load(self):
        for fault in self.config.faults:
            if fault == "load":
                raise OSError("no such file")
            prompt = None if fault == "no prompt" else "Hello"
            yield FaultyTask(Data(prompt=prompt, fault=fault), self.config.task)


__all__ = ["Faulty"]
"""


class Gateway:
    """A policy that calls the calculator, and answers with what it returns."""

    def __init__(self) -> None:
        self.held: asyncio.Event | None = None
        """Requests of held keys wait for it."""
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()
        self.requests: list[str] = []
        self.refusal: tuple[int, dict[str, Any]] | None = None

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        key = request.headers["X-Session-ID"].partition(".")[0]
        body = await request.json()
        self.requests.append(key)
        self.asked.set()
        if self.held is not None and key.startswith("held"):
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.given_up.set()
                raise
        if self.refusal:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        question = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": question["content"]}
        if question["role"] == "user" and body.get("tools"):
            arguments = json.dumps({"expression": question["content"].split()[-1].strip("?")})
            function = {"name": "calculator", "arguments": arguments if "bad" not in key else "{}"}
            message |= {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response(head | {"choices": [choice], "usage": usage})

    async def start(self) -> str:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(application, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0]
        return f"http://{host}:{port}/v1"


class Rig:
    """Episodes of some rows."""

    def __init__(self, gateway: Gateway, url: str, rows: list[dict[str, Any]]):
        self.gateway, self._url, self._rows = gateway, url, rows
        self._numbers = itertools.count()

    async def play(self, row: int, key: str = "key") -> Episode:
        unused: Any = None
        name = f"{key}-{next(self._numbers)}"
        task = EpisodeTask(
            (1,), "", "", self._rows[row], 100, 1, "", unused, unused, self._url, f"secret.{name}"
        )
        return await play(task, unused, unused, venv=str(VENV))


def run(rows: list[dict[str, Any]], test: Callable[[Rig], Awaitable[None]]) -> None:
    """Run a test, and see that no process is left."""

    async def main() -> None:
        verifiers._server.cache_clear()
        gateway = Gateway()
        try:
            async with asyncio.timeout(120):
                await test(Rig(gateway, await gateway.start(), rows))
        finally:
            for row in rows[:1]:
                server = verifiers._server(str(VENV), row["environment"])
                if server.started is not None and not (process := await server.started).is_full:
                    process._transport.write_eof()  # as if this process had ended
                    while not process.is_full:
                        await asyncio.sleep(0.01)
                server.forks.kill()
                server.forks.close()
            await gateway.runner.cleanup()

    asyncio.run(main())
    wait_for(lambda: not children(), message=lambda: str(children()))


def children() -> list[psutil.Process]:
    """Servers of verifiers and of tools."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if any(str(VENV) in part for part in _line(p))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # as in a run


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(problems(venv=str(VENV), taskset=TASKSET))


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty_tasks.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_tasks_are_prompts(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 24
    assert {row["prompt"] for row in rows} == {f"What is {json.loads(r['task'])['prompt'][8:]}" for r in rows}
    for row in rows:
        a, b = row["prompt"].removeprefix("What is ").removesuffix("?").split("*")
        assert row["answer"] == str(int(a) * int(b))
    assert not children()


def test_episodes_with_a_tool_and_a_server_that_dies(rows: list[dict[str, Any]]) -> None:
    async def test(rig: Rig) -> None:
        first = await asyncio.gather(*(rig.play(i) for i in range(24)))
        for episode in first:
            assert episode.reward == 1
            assert episode.metrics["calculator_calls"] == episode.metrics["correct"] == 1
            assert episode.metrics["calculator_errors"] == 0
        assert sorted(Counter(rig.gateway.requests).values()) == [2] * 24
        wrong = await rig.play(0, "bad")
        assert (wrong.reward, wrong.metrics["calculator_errors"]) == (0, 1)

        # One that is given up: its request at the gateway ends.
        rig.gateway.held = asyncio.Event()
        rig.gateway.asked.clear()
        waiting = asyncio.create_task(rig.play(1, "held"))
        await rig.gateway.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        await rig.gateway.given_up.wait()

        # The server dies while two episodes wait for a turn; the next call starts another one.
        rig.gateway.asked.clear()
        lost = [asyncio.create_task(rig.play(i, f"held{i}")) for i in (2, 3)]
        while sum(key.startswith(("held2", "held3")) for key in rig.gateway.requests) < 2:
            await asyncio.sleep(0.01)
        (fork_server,) = (p for p in psutil.Process().children() if str(VENV) in " ".join(_line(p)))
        (server,) = fork_server.children()
        tools = server.children(recursive=True)
        assert tools
        os.kill(server.pid, signal.SIGKILL)
        for ended in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(ended, EpisodeLost)
        again = await rig.play(2)
        assert again == Episode(1.0, again.metrics)

        # The process that has imported the library dies, and the server with it.
        started = verifiers._server(str(VENV), rows[0]["environment"]).started
        assert started is not None
        fork_server.kill()
        while not started.result().is_full:
            await asyncio.sleep(0.01)
        assert (await rig.play(2)).reward == 1
        assert psutil.wait_procs(tools, timeout=30)[1] == []

        # What the gateway refuses.
        rig.gateway.refusal = (
            400,
            {"error": {"code": "context_length_exceeded", "message": "no token is left"}},
        )
        assert (await rig.play(4)).reward == 0
        rig.gateway.refusal = 400, {"error": {"code": "invalid_request", "message": "temperature: no"}}
        with pytest.raises(RuntimeError, match="temperature: no"):
            await rig.play(4)

    run(rows, test)


@pytest.mark.long  # starts two servers
def test_an_episode_that_is_given_up_while_the_server_starts(rows: list[dict[str, Any]]) -> None:
    async def test(rig: Rig) -> None:
        first = asyncio.create_task(rig.play(0))
        while not children():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        assert (await rig.play(0)).reward == 1
        (server,) = (p for p in psutil.Process().children() if str(VENV) in " ".join(_line(p)))
        assert len(server.children()) == 1, "it is not started twice"

    run(rows, test)


@pytest.mark.long  # starts two servers
def test_faults_of_a_taskset_are_told(faulty: Path) -> None:
    rows = list(
        problems(venv=str(VENV), taskset={"id": "faulty_tasks", "faults": ["", "reward", "no prompt"]})
    )
    assert len(rows) == 3

    async def test(rig: Rig) -> None:
        assert await rig.play(0) == Episode(0.25, {"right": 0.25, "length": 7.0})
        with pytest.raises(RuntimeError, match="no key"):
            await rig.play(1)
        with pytest.raises(RuntimeError, match="task has no prompt"):
            await rig.play(2)

    run(rows, test)


STARTS = pytest.mark.long  # each starts a server, which takes four seconds


@pytest.mark.parametrize(
    ("venv", "taskset", "message"),
    [
        ("nowhere", TASKSET, "nowhere/bin/python is missing; make that environment"),
        (VENV, {}, "taskset has no id"),
        (ROOT / ".venv", TASKSET, "there is no module 'verifiers'.* see docs/environments.md"),
        pytest.param(VENV, {"id": "no_such_tasks"}, "taskset 'no_such_tasks' not found", marks=STARTS),
        pytest.param(VENV, {"id": "faulty_tasks", "colour": "red"}, "colour", marks=STARTS),
        pytest.param(
            VENV, {"id": "faulty_tasks", "faults": ["", "load"]}, "OSError: no such file", marks=STARTS
        ),
    ],
    ids=["no venv", "no id", "no verifiers", "no package", "no such setting", "load"],
)
def test_mistakes_are_told_before_anything_starts(
    faulty: Path, venv: Path, taskset: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(problems(venv=str(venv), taskset=taskset))
    assert not children()


def test_a_source_that_is_not_read_to_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed; what serves its tools ends by itself, and removes its folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = {"type": "rpg_megatron.environments.verifiers:problems", "venv": str(VENV), "taskset": TASKSET}
    rows = custom_rows(ImportedSettings.model_validate(settings), None, "data.source", streaming=True)
    index, _, row = next(rows)
    assert index == 0
    assert isinstance(row, dict)
    assert list(tmp_path.glob("verifiers-*"))
    rows.close()
    wait_for(lambda: not list(tmp_path.iterdir()))

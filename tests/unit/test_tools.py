"""Tools in an episode: whatever the policy writes as a call, it is told the result, and the chat goes on.

Why: a policy that learns writes every kind of call; one that raises, hangs or answers with a megabyte must
not end an episode, and must be counted. The gateway is a stand-in. Not covered: hostile programs in the
sandbox (test_sandbox), a real engine (test_episode_run).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from examples.calculator.calculator import calculator
from examples.search.search import make_database, search
from rpg_megatron.environments import tools
from rpg_megatron.environments.tools import Toolbox, ToolError, ToolUse, function_tool, use_tools
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import Episode, EpisodeTask
from tests.support.ranks import ROOT

CALCULATOR, SEARCH = "examples.calculator.calculator:calculator", "examples.search.search:search"
Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


def blocking(seconds: float, times: int = 1) -> str:
    """Wait without await."""
    for _ in range(times):
        time.sleep(seconds)
    return "waited"


async def talkative(count: int) -> str:
    """Say much."""
    return "a" * count + "b" * count


async def failing(kind: str) -> str:
    """Fail."""
    raise {"tool": ToolError("no such city"), "other": KeyError("x")}[kind]


async def keyword_only(*, kind: str) -> str:
    """Take no positional argument."""
    return kind


def box(*functions: Callable[..., Any], **limits: Any) -> Toolbox:
    return Toolbox([function_tool(f, f.__name__) for f in functions], **limits)


def call(toolbox: Toolbox, name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return asyncio.run(toolbox.call(name, text))


def test_what_the_policy_is_told_of_a_tool() -> None:
    async def lookup(name: str, most: int = 3, kinds: list[str] | None = None) -> str:
        """Look a name up,
        in the list.

        This is for readers of the code.
        """
        return f"{name} {most + 1} {kinds}"

    toolbox = box(lookup)
    (schema,) = toolbox.schemas
    assert schema["function"]["name"] == "lookup"
    assert schema["function"]["description"] == "Look a name up, in the list."
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["name"]
    assert parameters["properties"]["most"] == {"type": "integer", "default": 3}
    assert call(toolbox, "lookup", {"name": "a", "most": "4", "kinds": ["b"]}) == "a 5 ['b']"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "seconds: Field required"),
        ("{", "the arguments are not valid JSON: Expecting"),
        ("[1]", "the arguments are no JSON object"),
        ("null", "the arguments are no JSON object"),
        ('{"seconds": "soon"}', "seconds: Input should be a valid number"),
        ('{"seconds": 0, "minutes": 1}', "minutes: Extra inputs are not permitted"),
        ("[" * 100_000, "the arguments are not valid JSON: maximum recursion"),
        ('{"seconds": 1000}', "no result after 0.2 s"),
    ],
)
def test_a_call_that_is_no_good_is_told_and_counted(arguments: str, message: str) -> None:
    toolbox = box(slow, seconds=0.2)
    answer = call(toolbox, "slow", arguments)
    assert answer.startswith("error: ")
    assert message in answer
    assert (toolbox.metrics["slow_calls"], toolbox.metrics["slow_errors"]) == (1, 1)


def test_failures_long_results_and_unknown_tools() -> None:
    toolbox = box(talkative, failing, characters=100)
    assert call(toolbox, "failing", {"kind": "tool"}) == "error: no such city"
    assert call(toolbox, "failing", {"kind": "other"}) == "error: KeyError: 'x'"
    answer = call(toolbox, "talkative", {"count": 10**6})
    assert answer == "a" * 50 + "\n[1999900 characters left out]\n" + "b" * 50
    assert call(toolbox, "nothing", {}) == "error: there is no tool 'nothing'; there are: talkative, failing"
    counts = {key: n for key, n in toolbox.metrics.items() if not key.endswith("_seconds")}
    assert counts == {
        "unknown_tool_calls": 1,
        "talkative_calls": 1,
        "talkative_errors": 0,
        "talkative_raised": 0,
        "failing_calls": 2,
        "failing_errors": 2,
        "failing_raised": 1,
    }


class PanicException(BaseException):
    """As pyo3 raises it for a library in Rust."""


def leaving(kind: str) -> str:
    """Raise what is no Exception."""
    if kind == "exit":
        sys.exit(3)
    kinds: dict[str, BaseException] = {
        "interrupt": KeyboardInterrupt(),
        "panic": PanicException("index out of bounds"),
        "cancelled": asyncio.CancelledError(),
        "its own time": TimeoutError("no answer of the server"),
        "stop": StopIteration(),
    }
    raise kinds[kind]


async def leaving_later(kind: str) -> str:
    """The same in the event loop."""
    return leaving(kind)


@pytest.mark.parametrize("tool", [leaving, leaving_later])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("panic", "PanicException: index out of bounds"),
        ("cancelled", "CancelledError"),
        ("its own time", "TimeoutError: no answer of the server"),
        ("stop", "RuntimeError|StopIteration"),
    ],
)
def test_a_tool_that_leaves_is_told_and_counted(tool: Callable[..., Any], kind: str, told: str) -> None:
    """Whatever it raises: the response goes on."""
    toolbox = box(tool)
    answer = call(toolbox, tool.__name__, {"kind": kind})
    assert re.match(f"error: ({told})", answer), answer
    assert (toolbox.metrics[f"{tool.__name__}_errors"], toolbox.metrics[f"{tool.__name__}_raised"]) == (1, 1)


def test_an_episode_that_is_ended_ends_its_call() -> None:
    async def run() -> None:
        ending = asyncio.create_task(box(slow).call("slow", '{"seconds": 1000}'))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(run())


def test_parameters_of_any_name() -> None:
    """Pydantic has no fields of such names: each call would be refused."""

    async def odd(
        _x: int, model_config: str = "a", model_dump: int = 2, json: int = 3, parameter_0: int = 4
    ) -> str:
        """Take odd names."""
        return f"{_x} {model_config} {model_dump} {json} {parameter_0}"

    toolbox = box(odd)
    (schema,) = toolbox.schemas
    assert list(schema["function"]["parameters"]["properties"]) == [
        "_x", "model_config", "model_dump", "json", "parameter_0",
    ]  # fmt: skip
    assert schema["function"]["parameters"]["required"] == ["_x"]
    assert call(toolbox, "odd", {"_x": 1}) == "1 a 2 3 4"
    every = {"_x": "5", "model_config": "b", "model_dump": 6, "json": 7, "parameter_0": 8}
    assert call(toolbox, "odd", every) == "5 b 6 7 8"
    assert call(toolbox, "odd", {"parameter_0": 1}) == "error: _x: Field required"
    assert "parameter_9: Extra inputs" in call(toolbox, "odd", {"_x": 1, "parameter_9": 1})


def test_half_a_character_stays_out_of_the_chat() -> None:
    """The chat could not be encoded with it."""

    async def names(text: str = "") -> str:
        """A file's name."""
        return "a\udcff" + text

    toolbox = box(names)
    assert call(toolbox, "names", {}) == "a?"
    assert "surrogates not allowed" in call(toolbox, "names", '{"text": "\\ud83d"}')


def test_functions_that_block_run_beside_each_other() -> None:
    toolbox = box(blocking)

    async def run() -> float:
        began = time.monotonic()
        await asyncio.gather(*(toolbox.call("blocking", '{"seconds": 0.5}') for _ in range(40)))
        return time.monotonic() - began

    assert asyncio.run(run()) < 10  # one after the other: 20
    assert toolbox.metrics["blocking_calls"] == 40


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*48", "1776"),
        (" (17 + 4) * 2 ** 3 / sqrt(2) ", "118.79393923933998"),
        ("6/2", "3"),
        ("2^10 - 1", "1023"),
        ("-7 // 2 + 7 % 4", "-1"),
        ("max(1, 2.5) + abs(-1)", "3.5"),
        ("2**-1", "0.5"),
        ("1e400", "inf"),
        ("1/3", "0.3333333333333333"),
        ("9" * 900, "9" * 900),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert asyncio.run(calculator(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**100000",
        f"{'9' * 900} ** 2",
        "(" * 900,
        "1" * 1001,
        "10**300 ** 20",
        "1.5**100000",
        "1/0",
        "sqrt(-1)",
        "(-8)**0.5",
        "",
        "x",
        "__import__('os').system('true')",
        "().__class__",
        "[1 for _ in range(10**9)]",
        "'a' * 10**9",
        "max()",
        "round(1, 2, 3)",
        "True + 1",
        "lambda: 1",
        "floor(1e400)",
        "1 if 1 else 2",
        "sqrt(x=1)",
    ],
)
def test_the_calculator_refuses_the_rest_at_once(expression: str) -> None:
    began = time.monotonic()
    with pytest.raises(ToolError):
        asyncio.run(calculator(expression))
    assert time.monotonic() - began < 5


def write_documents(folder: Path) -> Path:
    texts = {"Foxes": "The quick fox runs.", "Dogs": "A lazy dog sleeps.", "Both": "Foxes and dogs. " * 200}
    lines = [json.dumps({"title": title, "text": text}) + "\n" for title, text in texts.items()]
    (folder / "documents.jsonl").write_text("".join(lines))
    assert make_database(folder / "documents.jsonl", folder / "documents.db") == 3
    return folder / "documents.db"


def test_search(tmp_path: Path) -> None:
    tool = search(str(write_documents(tmp_path)), results=2, characters=40)
    assert tool("quick fox").startswith("Foxes\nThe quick fox runs.")
    assert "Both\n" + ("Foxes and dogs. " * 3)[:40] in tool("dogs fox")
    assert tool("elephant") == "nothing found"
    for query in ('" OR 1', "documents MATCH *", "NEAR(fox dog)", "title:x -y", "a" * 10**6, "fox " * 10**5):
        assert isinstance(tool(query), str)
    for query in ("", "\"'*", "\0"):
        with pytest.raises(ToolError, match="no words"):
            tool(query)


def test_the_program_that_makes_a_database(tmp_path: Path) -> None:
    (tmp_path / "documents.jsonl").write_text('{"title": "a", "text": "b"}\n{"title": "c"}\n')

    search_program = str(ROOT / "examples" / "search" / "search.py")

    def make() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, search_program, "documents.jsonl", "d.db"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = make()
    assert done.returncode == 1
    assert done.stderr.startswith("documents.jsonl: KeyError: 'text'; each line must be")
    assert not (tmp_path / "d.db").exists()
    (tmp_path / "documents.jsonl").write_text('{"title": "a", "text": "b"}\n')
    assert make().stdout == "d.db: 1 documents\n"
    assert make().stderr == "d.db exists; remove it, or name another file\n"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["pythons"], "has no 'pythons'; check the name"),
        ([CALCULATOR, CALCULATOR], "two tools are called calculator"),
        ([{CALCULATOR: {"digits": 3}}], "calculator is a function, which has no settings"),
        ([{SEARCH: {"database": "nowhere.db"}}], "unable to open database file; make it with python "),
        ([{"python": {"hours": 1}}], "python has no setting 'hours'"),
        ([{"python": {"seconds": "many"}}], "tools.seconds: Input should be a valid number"),
        ([{"tests.unit.test_tools:Holder": {"a": 1}}], "has no setting 'a'"),
        (["tests.unit.test_tools:NoDocstring"], "NoDocstring has no docstring"),
        (["tests.unit.test_tools:NoCall"], "__call__; add it"),
        (["no_such_module:tool"], "there is no module 'no_such_module'"),
        (["os:sep"], "is a str, not a function"),
        (["tests.unit.test_tools:box"], "box has no docstring"),
        (["tests.unit.test_tools:keyword_only"], "parameter kind needs"),
        ([], "at least 1 item"),
        ([{}], "check the name"),
    ],
)
def test_tools_are_checked_before_anything_starts(entries: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        ToolUse(tools=entries)


def sample(reply: Reply, **settings: Any) -> tuple[Episode, list[dict[str, Any]]]:
    """``use_tools`` at a stand-in gateway; the episode, and the requests."""
    requests: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        requests.append(await request.json())
        status, body = reply(requests[-1])
        return web.json_response(body, status=status)

    async def score(text: str | None = None) -> Score:
        correct = text == "It is 1776."
        return Score(float(correct), correct, text, "", {})

    async def run() -> Episode:
        tools._session.cache_clear()
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        unused: Any = None
        task = EpisodeTask(
            (), "What is 37*48?", "", {}, 9, 9, "", unused, unused, f"http://{host}:{port}/v1", "key"
        )
        try:
            return await use_tools(task, unused, score, ToolUse(**settings))
        finally:
            await tools._session().close()
            await runner.cleanup()

    return asyncio.run(run()), requests


def said(content: str, *calls: tuple[str, str]) -> tuple[int, dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return 200, {"choices": [{"message": message}]}


def test_a_chat_with_calls() -> None:
    def reply(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        results = [m["content"] for m in request["messages"] if m["role"] == "tool"]
        if not results:
            return said("", ("calculator", '{"expression": "37*48"}'), ("calculator", "{"), ("browser", "{}"))
        return said(f"It is {results[0]}.")

    episode, requests = sample(reply, tools=[CALCULATOR], system="Be brief.")
    assert [len(r["messages"]) for r in requests] == [2, 6]
    assert requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [m["tool_call_id"] for m in requests[1]["messages"][3:]] == ["c0", "c1", "c2"]
    assert requests[0]["tools"][0]["function"]["name"] == "calculator"
    assert isinstance(episode.reward, Score)
    assert episode.reward.correct
    assert episode.metrics["calculator_calls"] == 2
    assert episode.metrics["calculator_errors"] == episode.metrics["unknown_tool_calls"] == 1


def test_it_ends_when_no_token_is_left() -> None:
    def reply(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(request["messages"]) > 1:
            return 400, {"error": {"code": "context_length_exceeded", "message": "no token is left"}}
        return said("It is 1776.", ("calculator", '{"expression": "1"}'))

    episode, requests = sample(reply, tools=[CALCULATOR])
    assert isinstance(episode.reward, Score)
    assert not episode.reward.correct, "a message with a call is no answer"
    assert len(requests) == 2


def test_tools_that_leave_no_token_fail_the_episode() -> None:
    with pytest.raises(RuntimeError, match="the text of the tools leave no token for a turn"):
        sample(lambda request: (400, {"error": {"code": "context_length_exceeded"}}), tools=[CALCULATOR])


def test_an_exception_of_a_tool_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tools._warn.cache_clear()
    toolbox = box(failing)
    for _ in range(3):
        assert call(toolbox, "failing", {"kind": "other"}) == "error: KeyError: 'x'"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tool failing: KeyError: 'x' (")
    assert Path(__file__).name in line


def test_an_error_of_the_gateway_fails_the_episode() -> None:
    with pytest.raises(RuntimeError, match=r"answers with status 500: .*no engine"):
        sample(lambda request: (500, {"error": "no engine"}), tools=[CALCULATOR])


class Holder:
    """A tool that must be closed."""

    open: list[Holder] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.open.append(self)

    def __call__(self, text: str) -> str:
        """Repeat."""
        return text

    def close(self) -> None:
        self.open.remove(self)


class NoDocstring:
    def __call__(self, text: str) -> str:
        return text


class NoCall:
    """Not a tool."""


class Inherits(Holder):
    """A tool of a class above."""


def test_a_tool_may_inherit_its_call() -> None:
    toolbox = ToolUse(tools=["tests.unit.test_tools:Inherits"]).make()
    (schema,) = toolbox.schemas
    toolbox.close()
    assert schema["function"]["description"] == "Repeat."


def test_tools_are_closed_whatever_happens() -> None:
    with pytest.raises(RuntimeError):
        sample(lambda request: (500, {}), tools=["tests.unit.test_tools:Holder"])
    sample(lambda request: said("It is."), tools=["tests.unit.test_tools:Holder"])
    module: Awaitable[Any] | Any = sys.modules["tests.unit.test_tools"]
    assert module.Holder.open == []


def test_two_programs_of_an_episode_share_files_and_no_others() -> None:
    def reply(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        texts = [m["content"] for m in request["messages"] if m["role"] == "tool"]
        if not texts:
            return said("", ("python", json.dumps({"code": "open('n', 'w').write('1776')"})))
        if len(texts) == 1:
            return said("", ("python", json.dumps({"code": "print('It is', open('n').read(), end='.')"})))
        return said(texts[1].replace(" .", "."))

    try:
        episode, _ = sample(reply, tools=[{"python": {"seconds": 20}}])
    except ValidationError as e:
        pytest.skip(str(e))
    assert isinstance(episode.reward, Score)
    assert episode.reward.correct, episode
    assert episode.metrics["python_calls"] == 2

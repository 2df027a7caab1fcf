"""Tools that the policy calls in a chat: Python functions, and an episode in which it calls them.

A tool is a function with annotated parameters; its docstring is what the policy is told. A class is a tool
too: each episode has an instance of its own, made with the tool's settings, that is called and, if it has
``close``, closed at the end. ``use_tools`` is the episode; docs/environments.md.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from rpg_megatron.config.errors import UserError
from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText
from rpg_megatron.system.custom_code import CustomCode, load_custom
from rpg_megatron.system.import_path import load_function

STANDARD = "rpg_megatron.environments.standard_tools"
"""Module of the tool that is named without a module."""
FULL = "context_length_exceeded"
"""Code of the gateway's refusal when no token or turn is left."""
_THREADS = 256

type Message = dict[str, Any]


class ToolError(Exception):
    """A call that failed; the policy is told the message, and the call is counted."""


class Tool(NamedTuple):
    """A function that the policy can call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Raises ToolError, or anything else, if it fails."""
    close: Callable[[], None] = lambda: None


class Toolbox:
    """The tools of one episode."""

    def __init__(self, tools: Sequence[Tool], *, seconds: float = 60.0, characters: int = 8000):
        """seconds: limit of a call. characters: of a result; the middle of a longer one is left out."""
        self._tools = {tool.name: tool for tool in tools}
        self._seconds, self._characters = seconds, characters
        kinds = ("calls", "errors", "raised", "seconds")
        self.metrics = {"unknown_tool_calls": 0.0}
        """Of each tool in this episode: calls, failed calls, those of them by exceptions of the tool, and
        seconds."""
        self.metrics |= dict.fromkeys((f"{name}_{kind}" for name in self._tools for kind in kinds), 0.0)

    @property
    def schemas(self) -> list[Message]:
        """The tools, as OpenAI's API describes them."""
        fields = ("name", "description", "parameters")
        return [
            {"type": "function", "function": {field: getattr(tool, field) for field in fields}}
            for tool in self._tools.values()
        ]

    async def call(self, name: str, arguments: str) -> str:
        """What the policy is told of a call; raises nothing. arguments: a JSON object."""
        tool = self._tools.get(name)
        if tool is None:
            self.metrics["unknown_tool_calls"] += 1
            return f"error: there is no tool {name!r}; there are: {', '.join(self._tools)}"
        began, limit, task = time.monotonic(), asyncio.timeout(self._seconds), asyncio.current_task()
        try:
            async with limit:
                result = await tool.call(_object_in(arguments))
        except GeneratorExit:
            raise
        except ToolError as e:
            result = self._failed(name, str(e))
        except BaseException as e:  # of the tool's code, such as sys.exit or a panic of a library in Rust
            if isinstance(e, asyncio.CancelledError) and task and task.cancelling():
                raise
            if limit.expired():
                result = self._failed(name, f"no result after {self._seconds:g} s")
            else:
                result = self._failed(name, f"{type(e).__name__}: {e}")
                self.metrics[f"{name}_raised"] += 1
                _warn(name, *_place_of(e))
        self.metrics[f"{name}_calls"] += 1
        self.metrics[f"{name}_seconds"] += time.monotonic() - began
        if (left_out := len(result) - self._characters) > 0:
            half = self._characters // 2
            result = f"{result[:half]}\n[{left_out} characters left out]\n{result[-half:]}"
        return result.encode(errors="replace").decode()  # half a surrogate pair is no character

    def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            tool.close()

    def _failed(self, name: str, message: str) -> str:
        self.metrics[f"{name}_errors"] += 1
        return f"error: {message}"


def _object_in(arguments: str) -> dict[str, Any]:
    try:
        given = json.loads(arguments or "{}")
        json.dumps(given, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as e:
        raise ToolError(f"the arguments are not valid JSON: {str(e)[:200]}") from None
    if not isinstance(given, dict):
        raise ToolError("the arguments are no JSON object")
    return given


def _place_of(error: BaseException) -> tuple[str, str, str]:
    """Type and message of an exception, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:200]
    return type(error).__name__, message, f"{frame.filename}:{frame.lineno}"


@lru_cache(100)
def _warn(tool: str, kind: str, message: str, place: str) -> None:
    """Say once what is wrong."""
    print(f"tool {tool}: {kind}: {message} ({place}); told to the policy, and counted", file=sys.stderr)


async def chat(url: str, key: str, messages: list[Message], toolbox: Toolbox, model: str = "") -> None:
    """Let the policy answer and call tools until it calls none, or no token or turn is left.

    What it answers and what the tools return is appended to ``messages``. url: of an OpenAI API. Raises
    RuntimeError if that answers with an error.
    """
    body: Message = {"model": model or "policy", "messages": messages}
    if toolbox.schemas:
        body["tools"] = toolbox.schemas
    while True:
        headers = {"Authorization": f"Bearer {key}"}
        async with _session().post(f"{url}/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            if FULL in text and any(message["role"] == "assistant" for message in messages):
                return
            if FULL in text:
                raise RuntimeError(
                    "the messages and the text of the tools leave no token for a turn; raise "
                    "rollout.max_response_tokens, or shorten them"
                )
            raise RuntimeError(f"{url} answers with status {response.status}: {text[:500]}")
        message = json.loads(text)["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            content = await toolbox.call(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class ToolUse(BaseModel):
    """Settings of ``use_tools``."""

    model_config = ConfigDict(extra="forbid")

    tools: list[str | dict[str, dict[str, Any]]] = Field(min_length=1)
    """Tools: ``python``, or import paths ``module:function``; with settings: ``{name: {setting: value}}``."""
    system: str = ""
    """System prompt."""
    seconds: float = Field(60.0, gt=0)
    """Time limit of a call; then the policy is told so."""
    characters: int = Field(8000, ge=100)
    """Longest result; the middle of a longer one is left out."""

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: Any) -> Any:
        made = [_make(entry) for entry in value]
        names = [tool.name for tool in made]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two tools are called {', '.join(sorted(repeated))}; rename one")
        for tool in made:
            tool.close()
        return value

    def make(self) -> Toolbox:
        """The tools of an episode."""
        return Toolbox([_make(e) for e in self.tools], seconds=self.seconds, characters=self.characters)


async def use_tools(task: EpisodeTask, generate: Generate, score: ScoreText, settings: ToolUse) -> Episode:
    """A chat: the prompt is the user's message, and the policy calls tools until it has its answer.

    The reward is the run's, of the last message without a call. ``Toolbox`` has the metrics ``env/*``.
    """
    toolbox = settings.make()
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    messages.append({"role": "user", "content": task.text})
    try:
        await chat(task.base_url, task.api_key, messages, toolbox)
    finally:
        toolbox.close()
    last = messages[-1]
    answer = "" if last.get("tool_calls") or last["role"] != "assistant" else last["content"]
    return Episode(await score(answer or ""), toolbox.metrics)


def function_tool(function: Callable[..., Any], name: str, close: Callable[[], None] = lambda: None) -> Tool:
    """The tool of a function, or of an object that is called. Raises ValueError if it cannot be one."""
    called: Any = function
    if not inspect.isroutine(function):  # not getattr, which finds that of the metaclass
        classes = (vars(kind) for kind in type(function).__mro__)
        called = next((names["__call__"] for names in classes if "__call__" in names), None)
    if called is None:
        raise ValueError(f"{name} has no __call__, which is the tool; add it")
    description, parameters, model, names = _describe(called, name, called is not function)
    is_async = inspect.iscoroutinefunction(called)

    async def call(arguments: dict[str, Any]) -> str:
        try:
            checked = {names[field]: value for field, value in model(**arguments)}
        except ValidationError as e:
            problems = (f"{'.'.join(map(str, p['loc'])) or name}: {p['msg']}" for p in e.errors())
            raise ToolError("; ".join(problems)) from None
        run = partial(function, **checked)
        if is_async:
            return str(await run())
        return str(await asyncio.get_running_loop().run_in_executor(threads(), _call, run))

    return Tool(name, description, parameters, call, close)


def _call(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except StopIteration as e:  # a future cannot hold it
        raise RuntimeError("StopIteration") from e


@lru_cache
def _describe(
    called: Callable[..., Any], name: str, is_method: bool
) -> tuple[str, dict[str, Any], type[BaseModel], dict[str, str]]:
    """What the policy is told of a function, the JSON schema of its arguments, and what checks them, with
    the parameter of each of its fields.
    """
    description = " ".join((called.__doc__ or "").strip().split("\n\n")[0].split())
    if not description:
        raise ValueError(f"{name} has no docstring, from which the policy learns what it does; add one")
    try:
        parameters = [*inspect.signature(called, eval_str=True).parameters.values()][is_method:]
    except NameError as e:
        raise ValueError(f"{name}: {e}; import what its annotations name") from None
    fields: dict[str, Any] = {}
    names = {f"parameter_{i}": p.name for i, p in enumerate(parameters)}  # pydantic's have no _ in front
    for field, parameter in zip(names, parameters, strict=True):
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.annotation is parameter.empty:
            raise ValueError(f"{name}: parameter {parameter.name} needs an annotation, and a name of its own")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[field] = parameter.annotation, default
    config = ConfigDict(extra="forbid", alias_generator=names.__getitem__)
    model = create_model(name, __config__=config, **fields)
    schema = {key: value for key, value in model.model_json_schema().items() if key != "title"}
    for value in schema.setdefault("properties", {}).values():
        value.pop("title", None)
    return description, schema, model, names


def _make(entry: str | dict[str, dict[str, Any]]) -> Tool:
    """A tool of the settings. Raises ValueError."""
    [(path, settings)] = [(entry, {})] if isinstance(entry, str) else list(entry.items()) or [("", {})]
    name = path.rpartition(":")[2]
    function_path = path if ":" in path else f"{STANDARD}:{path}"
    function: Any = _load(function_path)
    if not isinstance(function, type):
        if settings:
            raise ValueError(f"{path} is a function, which has no settings; write it as a class")
        return function_tool(function, name)
    try:
        made = load_custom(CustomCode("tools", function_path, settings, 0, instantiate=True))
    except UserError as e:
        raise ValueError(str(e)) from None
    return function_tool(made, name, getattr(made, "close", lambda: None))


@lru_cache
def _load(path: str) -> Any:
    return load_function(path)


@lru_cache
def threads() -> ThreadPoolExecutor:
    """Where functions run that are not asynchronous."""
    return ThreadPoolExecutor(_THREADS)


@lru_cache
def _session() -> aiohttp.ClientSession:
    """Connections of this process, which has one event loop."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

"""Runs episodes of the library verifiers: forks of a fork server in the library's own virtual environment.

Its own harnesses start a program for each response, with a package manager; ``ChatHarness`` is a chat in this
process, with the task's tools. Turns of the policy are sampled at the gateway of the sampler worker.

A call is an object:

- ``tasks``: each task is a line with ``prompt``, ``answer`` and ``task`` before the answer;
- ``task``, ``base_url`` and ``api_key``: an episode; its value has ``reward`` and ``metrics``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpcore2
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import MCPConnection, connect_mcp, mcp_content_to_chat_content
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import subprocess
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from rpg_megatron.config.files import remove
from rpg_megatron.environments.tools import FULL, Tool, Toolbox, ToolError, chat
from rpg_megatron.system.fork_server import Call, Serve, send_line, serve_calls

HARNESS = "rpg_megatron_chat"
"""``id`` of ``ChatHarness`` in settings of verifiers."""
_SECRET = "RPG_MEGATRON_API_KEY"
"""Environment variable with the first part of the gateway's keys. Programs that verifiers starts do not get
it, by its name."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat in this process, in which the policy calls the task's tools until it has its answer."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the chat."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools = await _tools(servers, stack)
            toolbox = Toolbox(tools, seconds=self.config.tool_timeout)
            await chat(endpoint, secret, messages, toolbox, ctx.model)
        trace.record_metrics(toolbox.metrics if tools else {})
        return vf.ProgramResult(0, "", "")


__all__ = ["ChatHarness"]


def load_server(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``). settings: as in verifiers' ``EnvConfig``."""
    os.dup2(2, 1)  # the library and tasksets print
    sys.modules[HARNESS] = sys.modules[__name__]  # verifiers imports a harness by its id
    launch._read_back_port = partial(_read_and_remove, launch._read_back_port)
    # An HTTP client for each episode's tools would read the machine's certificates for 20 ms.
    httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)

    def serve(connection: socket.socket) -> None:
        send_line(connection, os.getpid())
        with tempfile.TemporaryDirectory(prefix="verifiers-") as folder:
            subprocess.CACHE_DIR = Path(folder)  # for the folders of episodes, instead of $HOME
            asyncio.run(_serve(connection, settings))

    return serve, {"async": True, "deadline": 0.0, "grace": 30.0}


async def _serve(connection: socket.socket, settings: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        problem = ""
        try:
            environment = load_environment(_settings(settings))
            await stack.enter_async_context(environment.serving())
        except Exception as e:  # of the library, or of the taskset's package
            problem = f"taskset {settings['taskset']['id']!r}: {type(e).__name__}: {e}"

        async def run(call: Call) -> dict[str, Any]:
            if problem:
                return _failure(problem)
            if "tasks" in call.value:
                return await asyncio.to_thread(_send_tasks, call, environment)
            return await _run_episode(environment, call.value)

        await serve_calls(connection, run, growth=math.inf)  # it has the tasks


async def _read_and_remove(read: Callable[..., Awaitable[int]], runtime: vf.Runtime, path: str) -> int:
    """The port of a tool's server, from a file that verifiers leaves in /tmp."""
    try:
        return await read(runtime, path)
    finally:
        if runtime.type == "subprocess":
            remove(Path(path), ignore_errors=True)


def _settings(given: dict[str, Any]) -> vf.EnvConfig:
    """Every agent gets ``ChatHarness`` and no container, unless the settings or the taskset say otherwise."""
    taskset = given["taskset"]["id"]
    own = default_harness_id(taskset)
    seats = {}
    for name, field in env_config_type(taskset, given.get("id") or "").model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            harness = {} if own == taskset or field.default.harness else {"harness": {"id": HARNESS}}
            seats[name] = harness | {"runtime": {"type": "subprocess"}} | given.get(name, {})
    return resolve_env_config(given | seats)


def _send_tasks(call: Call, environment: vf.Env[Any]) -> dict[str, Any]:
    try:
        for task in environment.taskset:
            call.send(**_row(task))
    except Exception as e:
        return _failure(f"a task cannot be loaded: {type(e).__name__}: {e}")
    return {"value": None}


def _row(task: vf.Task) -> dict[str, Any]:
    data = task.data
    prompt = data.prompt if isinstance(data.prompt, str) else "\n\n".join(_texts(data.prompt))
    answer = getattr(data, "answer", None)
    return {
        "prompt": prompt or str(task.key),
        "answer": str(answer or task.key),
        "task": data.model_dump_json(),
    }


def _texts(messages: Any) -> Iterator[str]:
    for message in messages or ():
        content = message.content
        if isinstance(content, str):
            yield content
        else:
            yield from (part.text for part in content or () if part.type == "text")


def _failure(detail: str) -> dict[str, Any]:
    return {"failure": "error", "detail": detail}


async def _run_episode(environment: vf.Env[Any], call: dict[str, Any]) -> dict[str, Any]:
    task_type = type(environment.taskset).task_type()
    data = task_type.data_type().model_validate_json(call["task"])
    [slot] = environment.slots(task_type(data, environment.config.taskset.task))
    os.environ[_SECRET], _, session = call["api_key"].partition(".")
    client = vf.EvalClientConfig(base_url=call["base_url"], api_key_var=_SECRET)
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    numbers = itertools.count()

    def name_session(trace: vf.Trace) -> None:
        # Requests have it in the header X-Session-ID. With the whole key in the client's settings, verifiers
        # would keep a client for each episode: it closes none.
        trace.id = f"{session}.{next(numbers)}"

    episode = await environment.run_slot(slot, context, on_trace=name_session)
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    is_full = bool(errors) and all(FULL in error.message for error in errors)  # truncated: no failure
    if not episode.ok and not is_full:
        return _failure(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has failed")
    for trace in episode.traces:
        agent = trace.agent
        if agent is not None and not agent.trainable and agent.config.client.base_url == client.base_url:
            problem = "is not trained, but its turns would be: give it another model by client.base_url"
            return _failure(f"agent {agent.name} {problem}")
    if not traces:
        return _failure("no agent of the environment is trained")
    metrics: dict[str, float] = {}
    for trace in traces:
        named = {name: reward and reward.value for name, reward in trace.rewards.items()} | trace.metrics
        metrics |= {name: float(value) for name, value in named.items() if value is not None}
    reward = sum(trace.reward for trace in traces) / len(traces)
    return {"value": {"reward": reward, "metrics": metrics}}


async def _tools(servers: dict[str, dict[str, Any]], stack: AsyncExitStack) -> list[Tool]:
    """The tools of MCP servers."""
    schemas, names, connections = await connect_mcp({"mcpServers": servers}, stack)
    tools = []
    for schema in schemas:
        function = schema["function"]
        server, name = names[function["name"]]
        call = partial(_call_tool, connections[server], name)
        tools.append(Tool(function["name"], function["description"], function["parameters"], call))
    return tools


async def _call_tool(connection: MCPConnection, name: str, arguments: dict[str, Any]) -> str:
    result = await connection.run(lambda client: client.call_tool(name, arguments))
    content = mcp_content_to_chat_content(result.content)
    text = content if isinstance(content, str) else json.dumps(content)
    if result.is_error:
        raise ToolError(text)
    return text

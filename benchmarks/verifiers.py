"""Cost of episodes of verifiers: CPU of its server and of a tool's server. Needs ``make .venv-verifiers``."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import psutil
from aiohttp import web

from benchmarks.setup import ROOT, Report, benchmark, main
from rpg_megatron.environments.verifiers import play, problems
from rpg_megatron.rollout.episode import EpisodeTask

VENV = str(ROOT / ".venv-verifiers")


async def answer(request: web.Request) -> web.Response:
    """A policy that calls the calculator if there is one, and repeats what it is told."""
    body = await request.json()
    last = body["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
    if last["role"] == "user" and body.get("tools"):
        arguments = json.dumps({"expression": last["content"].split()[-1].strip("?")})
        function = {"name": "calculator", "arguments": arguments}
        message |= {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy"}
    return web.json_response(head | {"choices": [choice], "usage": usage})


@benchmark(episodes=16)
def verifiers(report: Report, episodes: int = 512) -> None:
    """CPU for each episode of the calculator example, all at once, with a policy that answers at once."""
    table = report.table(
        "tool", "episodes", "server, ms|.1f", "tool's server, ms|.1f", "wall, ms|.1f", "MiB|.0f"
    )
    for tool in (False, True):
        table.row("calculator" if tool else "none", episodes, *asyncio.run(measure(episodes, tool)))


async def measure(episodes: int, tool: bool) -> tuple[float, float, float, float]:
    """For each episode, milliseconds of CPU of both servers and of time; MiB of the first server."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    taskset = {"id": "calculator_products", "count": episodes, "tools": tool}
    rows = [*problems(venv=VENV, taskset=taskset)]
    unused: Any = None

    def episode(number: int, name: str) -> Any:
        key = f"secret.{name}{number}"
        task = EpisodeTask(
            (1,), "", "", rows[number], 9, 9, "", unused, unused, f"http://{host}:{port}/v1", key
        )
        return play(task, unused, unused, venv=VENV)

    await episode(0, "first")  # starts the server
    [fork_server] = psutil.Process().children()
    [server] = fork_server.children()
    tools = server.children()
    before, began = _cpu(server), time.monotonic()
    of_tools = sum(map(_cpu, tools))
    ended = await asyncio.gather(*(episode(number, "next") for number in range(episodes)))
    wall = time.monotonic() - began
    assert all(result.reward == tool for result in ended)
    spent = _cpu(server) - before, sum(map(_cpu, tools)) - of_tools, wall
    milliseconds = (1e3 * value / episodes for value in spent)
    memory = server.memory_info().rss / 2**20
    fork_server.kill()
    fork_server.wait()
    await runner.cleanup()
    return *milliseconds, memory  # type: ignore[return-value]


def _cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


if __name__ == "__main__":
    main(__doc__, verifiers)

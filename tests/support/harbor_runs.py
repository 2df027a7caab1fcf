"""Harbor's episodes with a script in place of the model, in the processes of a run: a sampler worker, its
environment workers, their sandboxes.

``python -m tests.support.harbor_runs CONFIG FOLDER COUNT SETTINGS`` runs episodes at once and prints JSON.
SETTINGS: keys of ``rollout.episode``, as JSON, besides its type.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from aiohttp import web

from rpg_megatron.environments.harbor import HarborSettings, play
from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText
from rpg_megatron.system.parent_death import set_child_subreaper
from tests.support.episode_rig import Engine, make_settings, make_task, sample


class ScriptedSettings(HarborSettings):
    """Settings of ``scripted``."""

    tasks: list[tuple[str, str]]
    """Folder and image of each task; the seed chooses."""
    commands: list[str]
    """Each is a call of the tool ``shell``."""
    without: str = ""
    """If this file exists, there are no calls."""


async def scripted(
    task: EpisodeTask, generate: Generate, score: ScoreText, settings: ScriptedSettings
) -> Episode:
    """``play``, whose turns come from a server of the script; the engine samples one turn, for the batch."""
    await generate(task.prompt, 5)
    place, image = settings.tasks[task.seed % len(settings.tasks)]
    commands = () if settings.without and Path(settings.without).exists() else tuple(settings.commands)
    url = await _script(commands)
    row = {"task": place, "image": image}
    return await play(replace(task, row=row, base_url=url, api_key="key"), generate, score, settings)


async def _script(commands: tuple[str, ...]) -> str:
    """Base URL of a server, one for each process, that calls a tool with the next command."""
    if commands not in _urls():
        app = web.Application()

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            turn = sum(m["role"] == "assistant" for m in body["messages"])
            message: dict[str, Any] = {"role": "assistant", "content": "done"}
            if turn < len(commands):
                function = {"name": "shell", "arguments": json.dumps({"command": commands[turn]})}
                message["tool_calls"] = [{"id": str(turn), "type": "function", "function": function}]
            return web.json_response({"choices": [{"message": message}]})

        app.router.add_post("/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        _urls()[commands] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    return _urls()[commands]


@lru_cache
def _urls() -> dict[tuple[str, ...], str]:
    return {}


def main() -> None:
    """See above. CPU seconds are those of all processes: this one gets the orphans and waits for them."""
    config, folder, count, keys = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    set_child_subreaper()
    began = time.monotonic()
    given = {name: json.dumps(value) for name, value in json.loads(keys).items()}
    settings = make_settings(config, "tests.support.harbor_runs:scripted", **given)
    _, scores = sample(settings, [Engine(random.Random(1))], folder, make_task(samples=count))
    seconds = time.monotonic() - began
    with suppress(ChildProcessError):
        while True:
            os.wait()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    said = {"rewards": scores.rewards, "parts": scores.parts, "failures": scores.failures.failed}
    print(json.dumps(said | {"cpu": cpu, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()

"""The episode of Harbor's tasks: a policy works in an image by its tools, then tests give the reward.

Why: what the tools say, what the tests see and what is counted must fit together over many turns. Real
sandboxes and images; the policy is a script behind OpenAI's API, whose gateway has tests of its own. Also a
run of two steps with a real engine. Not covered: what hostile policies do (test_hostile_episodes).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rpg_megatron.config import UserError
from rpg_megatron.environments import tools
from rpg_megatron.environments.harbor import HarborSettings, play
from rpg_megatron.rollout.episode import EpisodeTask, result_of
from tests.support.commands import Command
from tests.support.harbor_tasks import write_task
from tests.support.images import make_layout, make_root

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
TEST = """#!/bin/bash
value=$([ "$(cat /app/out)" = 42 ] && echo 0.5 || echo 0)
echo "{\\"reward\\": $value, \\"other\\": 1}" > /logs/verifier/reward.json
"""

TEMPLATE = (
    "{%- if tools %}{{ tools | length }} tools. {% endif %}"
    "{%- for m in messages %}{{ m.content or '' }}\n{%- endfor %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("image") / "root")


async def run(
    place: Path, image: str, calls: Sequence[tuple[str, dict[str, Any]]], **settings: Any
) -> tuple[Any, list[str]]:
    """The episode's result, and what each call has returned."""
    asked: list[list[dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body["messages"])
        assert {tool["function"]["name"] for tool in body["tools"]} == {"shell", "edit_file"}
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if len(asked) <= len(calls):
            name, arguments = calls[len(asked) - 1]
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": str(len(asked)), "type": "function", "function": function}]
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    row = {"task": str(place), "image": image}
    task = EpisodeTask((1,), "Do it.", "", row, 100, 0, "", lambda t: (), lambda t: "", url, "key")
    try:
        ended = await play(task, None, None, HarborSettings(**settings))  # type: ignore[arg-type]
    finally:
        await tools._session().close()
        tools._session.cache_clear()  # the next one has another event loop
        await runner.cleanup()
    assert asked[0][-1] == {"role": "user", "content": "Do it."}
    return result_of(ended), [m["content"] for m in asked[-1] if m["role"] == "tool"]


def test_an_episode_of_many_turns(tmp_path: Path, root: Path) -> None:
    place = write_task(tmp_path, "a", test=TEST, solve="true")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("shell", {"command": "pwd; echo 1 > out; exit 3"}),
        ("edit_file", {"path": "out", "old": "1\n", "new": "41\n"}),
        ("edit_file", {"path": "/app/out", "old": "7", "new": "8"}),
        ("edit_file", {"path": "/app/out", "old": "41", "new": "42"}),
        ("edit_file", {"path": "deep/er/file", "old": "", "new": "x"}),
        ("edit_file", {"path": "missing", "old": "x", "new": "y"}),
        ("shell", {"command": "cat out deep/er/file; seq 9000"}),
        ("shell", {"command": "ls /tests /solution"}),
    ]
    result, said = asyncio.run(run(place, str(root), calls, cache=str(tmp_path / "cache"), characters=200))
    assert said[0] == "error: exit code 3\n/app\n"
    assert said[1] == "out has 3 characters"
    assert said[2] == "error: the old text is 0 times in /app/out; give one that is there once"
    assert said[4] == "deep/er/file has 1 characters"
    assert said[5].startswith("error: missing: [Errno 2]")
    assert said[6].startswith("42\nx1\n2\n")
    assert "characters left out" in said[6]
    assert "No such file" in said[7]
    assert (result.reward.reward, result.reward.correct, result.reward.parts) == (0.5, False, {"tests": 0.5})
    metrics = result.metrics
    assert (metrics["shell_calls"], metrics["shell_errors"], metrics["edit_file_errors"]) == (3, 2, 2)
    assert metrics["no_reward"] == 0
    for name in ("image_seconds", "tests_seconds", "shell_seconds"):
        assert metrics[name] > 0
    assert metrics["waiting_seconds"] >= 0


@pytest.mark.parametrize(("said", "expected"), [("/home", "/home\n"), ("/", "/app\n"), ("", "/app\n")])
def test_where_commands_start(tmp_path: Path, root: Path, said: str, expected: str) -> None:
    """The image knows, also if a Dockerfile says another folder."""
    place = write_task(tmp_path, "a", condition="true", solve="true", config="")
    (place / "environment").mkdir()
    (place / "environment/Dockerfile").write_text("FROM a\nWORKDIR /app\n")
    image = make_layout(tmp_path / "layout", lambda tar: tar.add(root, "."), workdir=said)
    calls = [("shell", {"command": "pwd"})]
    assert asyncio.run(run(place, str(image), calls, cache=str(tmp_path / "cache")))[1] == [expected]


def test_time_for_all_commands_and_for_each(tmp_path: Path, root: Path) -> None:
    place = write_task(tmp_path, "a", condition="true", solve="true", seconds=1.5)
    calls = [("shell", {"command": "sleep 1000"})] * 3
    result, said = asyncio.run(run(place, str(root), calls, cache=str(tmp_path / "cache"), seconds=1.0))
    assert said[:2] == ["error: ended: limit of time\n"] * 2
    assert said[2] == "error: ended: limit of time\nno time is left for commands in this task\n"
    assert result.reward.reward == 1, "tests have time of their own"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 1", "the tests wrote neither reward.json nor reward.txt"),
        ("sleep 1000", "ended: limit of time"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt has no finite number"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "reward.json cannot be read: ValueError"),
        ("echo '{}' > /logs/verifier/reward.json", "reward.json cannot be read: ValueError"),
        ("mkdir /logs/verifier/reward.txt", "reward.txt cannot be read"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "the tests wrote neither"),
        ("head -c 9000000 /dev/zero > /logs/verifier/reward.txt", "reward.txt cannot be read"),
    ],
)
def test_tests_without_a_reward_give_0_and_a_reason(
    tmp_path: Path, root: Path, test: str, reason: str
) -> None:
    place = write_task(tmp_path, "a", test=f"#!/bin/bash\n{test}\n", solve="true", test_seconds=2)
    result, _ = asyncio.run(run(place, str(root), [], cache=str(tmp_path / "cache")))
    assert reason in result.reward.reason
    assert (result.reward.reward, result.metrics["no_reward"]) == (0, 1)


def test_one_command_at_once_makes_the_others_wait(tmp_path: Path, root: Path) -> None:
    place = write_task(tmp_path, "a", condition="true", solve="true")

    async def both() -> list[float]:
        settings = {"cache": str(tmp_path / "cache"), "at_once": 1}
        runs = [run(place, str(root), [("shell", {"command": "sleep 1"})], **settings) for _ in range(2)]
        return [result.metrics["waiting_seconds"] for result, _ in await asyncio.gather(*runs)]

    assert max(asyncio.run(both())) > 0.5


def test_an_image_that_is_missing_is_told(tmp_path: Path) -> None:
    place = write_task(tmp_path, "a", condition="true", solve="true")
    with pytest.raises(UserError, match=r"missing.sif: \[Errno 2\]"):
        asyncio.run(run(place, "missing.sif", []))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("forked_starts")
def test_a_run(config_file: Path, checkpoint: Path, tmp_path: Path, root: Path) -> None:
    """Two steps of real engines and ranks. The policy is a random model; its tasks pass at random."""
    tasks = tmp_path / "tasks"
    for n in range(16):
        write_task(
            tasks, f"task-{n}", condition="[ $((RANDOM % 2)) = 0 ]", solve="true", instruction=f"Solve {n}."
        )
    (tasks / "images.json").write_text(json.dumps({"shell": str(root)}))
    shutil.copytree(checkpoint, tmp_path / "model")
    described = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(described | {"chat_template": TEMPLATE}))
    play = "rpg_megatron.environments.harbor:play"
    settings = [
        "data.path=null",
        f"model.path={tmp_path / 'model'}",
        f"data.source={{type: rpg_megatron.environments.harbor:problems, folder: {tasks}}}",
        f"rollout.episode={{type: {play}, cache: {tmp_path / 'cache'}, system: ''}}",
        "training.steps=2",
        "training.tokens_per_microbatch=4000",
        "rollout.max_response_tokens=320",
        "rollout.tool_call_parser=hermes",
    ]  # fmt: skip
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=1500)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "runs/tiny-001/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "policy/loss" in row]
    assert len(rows) == 2
    assert 0 < rows[0]["reward/mean"] < 1
    assert rows[0]["env/tests_seconds"] > 0
    assert rows[0]["env/no_reward"] == 0

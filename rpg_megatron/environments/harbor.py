"""Tasks of Harbor's format as an environment: the policy works in a task's image, then tests give the reward.

``problems`` is the source of prompts, ``play`` the episode. What the policy has left running is ended before
the tests begin; what it has changed of programs and start-up files is undone (``image_root.py``); the tests'
folder and the reward's are mounted only then.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import shlex
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rpg_megatron.config.files import open_regular
from rpg_megatron.environments.harbor_tasks import HarborTask, problems, read_task
from rpg_megatron.environments.images import cache_folder, open_image
from rpg_megatron.environments.sandbox import Sandbox, Sandboxes, SandboxResult
from rpg_megatron.environments.sandbox_limits import SandboxLimits
from rpg_megatron.environments.tools import Toolbox, ToolError, chat, function_tool, threads
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText

__all__ = ["play", "problems"]

SYSTEM = "You solve a task in a Linux container by your tools. When you are done, answer without a call."
_SHELL = 'if command -v bash > /dev/null; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_PROCESSES = 256
SAFE = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_COUNT": "1",  # else git refuses repositories of another user
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
"""Environment variables of tests: Python does not find modules in the working folder in place of its own."""


class ImageSettings(BaseModel):
    """Where images are, and how many programs run in them; keys of ``play``."""

    model_config = ConfigDict(extra="forbid")

    cache: str = ""
    """Folder for unpacked images, on a disk of the node; empty: one in $TMPDIR."""
    cache_gib: float = Field(100.0, gt=0)
    """Its size; then images that were used longest ago are removed."""
    at_once: int = Field(os.cpu_count() or 1, ge=1)
    """Commands and tests at the same time in a process; others wait. By default, one for each core."""
    keep: tuple[str, ...] = ()
    """Paths whose changes tests see although they are of the system, or have a name that programs read by
    themselves."""


class HarborSettings(ImageSettings):
    """Settings of ``play``."""

    system: str = SYSTEM
    """System prompt."""
    seconds: float = Field(60.0, gt=0)
    """Time limit of a command."""
    characters: int = Field(8000, ge=100)
    """Longest result of a tool; the middle of a longer one is left out."""


class Tested(NamedTuple):
    """What tests say."""

    reward: float | None
    """None: they gave none."""
    reason: str
    output: str
    ended: str
    """Why they were ended, such as "time"; empty: they were not."""


class TaskSandbox:
    """A task in its image."""

    def __init__(self, task: HarborTask, sandbox: Sandbox, settings: ImageSettings):
        self.task, self.sandbox, self._settings = task, sandbox, settings
        self._left = task.seconds or math.inf
        self.metrics = {"waiting_seconds": 0.0, "tests_seconds": 0.0}

    async def run(self, command: Sequence[str], seconds: float) -> SandboxResult:
        """Run a program of the policy or the solution; all of them together have the task's time."""
        if self._left <= 0:
            return SandboxResult("no time is left for commands in this task\n", None, "time")
        result, took = await self._run(command, min(seconds, self._left))
        self._left -= took
        return result

    async def test(self) -> Tested:
        """Run the tests; no program of the policy runs after this."""
        script = self.task.folder / "tests/test.sh"
        try:
            tar = await asyncio.to_thread(pack, script.parent)
            await self.sandbox.give({"/tests": tar}, tests=self._settings.keep)
            command = [
                *with_variables(SAFE | self.task.test_variables),
                *script_command(script, "/tests/test.sh"),
            ]
            result, took = await self._run(command, self.task.test_seconds)
            self.metrics["tests_seconds"] = took
            if result.ended:
                return Tested(None, f"ended: limit of {result.ended}", result.output, result.ended)
            reward, reason = await self._reward()
            return Tested(reward, reason, result.output, "")
        except (OSError, ValueError) as e:  # a first line with half a quote
            return Tested(None, f"the tests cannot run: {e}", "", "")

    async def _run(self, command: Sequence[str], seconds: float) -> tuple[SandboxResult, float]:
        began = time.monotonic()
        async with _places(self._settings.at_once):
            started = time.monotonic()
            self.metrics["waiting_seconds"] += started - began
            return await self.sandbox.exec(command, seconds=seconds), time.monotonic() - started

    async def _reward(self) -> tuple[float | None, str]:
        for name in ("reward.json", "reward.txt"):
            try:
                text = (await self.sandbox.read(f"/logs/verifier/{name}")).decode()
                value = json.loads(text) if name.endswith("json") else float(text)
                if isinstance(value, dict):
                    [value] = [value["reward"]] if "reward" in value else value.values()
                if isinstance(value, bool | int | float) and math.isfinite(value):
                    return float(value), f"graded by {name}"
                return None, f"{name} has no finite number"
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, RecursionError, OverflowError) as e:
                return None, f"{name} cannot be read: {type(e).__name__}: {str(e)[:200]}"
        return None, "the tests wrote neither reward.json nor reward.txt"


@asynccontextmanager
async def open_task(
    task: HarborTask, settings: ImageSettings, *, network: bool = False
) -> AsyncIterator[TaskSandbox]:
    """A sandbox in a task's image. network: until its tests begin. Raises UserError, OSError."""
    with ExitStack() as stack:
        opened = open_image(task.image, cache_folder(settings.cache), settings.cache_gib)
        image = await asyncio.get_running_loop().run_in_executor(threads(), stack.enter_context, opened)
        limits = SandboxLimits(
            seconds=86_400.0,  # each call has its own
            memory_mib=task.memory_mib,
            processes=_PROCESSES,
            files_mib=task.storage_mib,
            root=str(image.root),
            workdir=task.workdir or image.workdir or task.built_workdir,
            variables=tuple((image.variables | task.variables).items()),
            network=network,
        )
        sandbox = await boxes().open(limits)
        stack.callback(sandbox.close)
        yield TaskSandbox(task, sandbox, settings)


class shell:
    """A tool: commands in the task's image."""

    def __init__(self, opened: TaskSandbox, seconds: float):
        self._opened, self._seconds = opened, seconds

    async def __call__(self, command: str) -> str:
        """Run a shell command and return what it prints. Files stay; nothing goes on running."""
        result = await self._opened.run(["sh", "-c", _SHELL, "sh", command], self._seconds)
        if result.code == 0:
            return result.output
        reason = f"ended: limit of {result.ended}" if result.ended else f"exit code {result.code}"
        raise ToolError(f"{reason}\n{result.output}")


class edit_file:
    """A tool: changes a file in the task's image."""

    def __init__(self, opened: TaskSandbox):
        self._sandbox = opened.sandbox

    async def __call__(self, path: str, old: str, new: str) -> str:
        """Replace a text, which must be in the file once, by another. No old text: write the whole file."""
        try:
            if old:
                content = (await self._sandbox.read(path)).decode()
                if (count := content.count(old)) != 1:
                    raise ToolError(f"the old text is {count} times in {path}; give one that is there once")
                new = content.replace(old, new)
            await self._sandbox.write(path, new.encode())
        except (OSError, UnicodeError) as e:
            raise ToolError(f"{path}: {e}") from None
        return f"{path} has {len(new)} characters"


async def play(task: EpisodeTask, generate: Generate, score: ScoreText, settings: HarborSettings) -> Episode:
    """A chat in which the policy works in the task's image by ``shell`` and ``edit_file``; the tests' reward.

    Tests that give no reward give 0 (``env/no_reward``).
    """
    row, began = task.row or {}, time.monotonic()
    async with open_task(read_task(row["task"], row["image"]), settings) as opened:
        metrics = {"image_seconds": time.monotonic() - began}
        tools = [
            function_tool(shell(opened, settings.seconds), "shell"),
            function_tool(edit_file(opened), "edit_file"),
        ]
        toolbox = Toolbox(tools, seconds=math.inf, characters=settings.characters)
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        await chat(task.base_url, task.api_key, [*messages, {"role": "user", "content": task.text}], toolbox)
        tested = await opened.test()
        metrics |= opened.metrics | toolbox.metrics | {"no_reward": tested.reward is None}
    reward = tested.reward or 0.0
    return Episode(Score(reward, reward >= 1.0, None, tested.reason, {"tests": reward}), metrics)


def pack(folder: Path) -> bytes:
    """A tar file of a folder, without its name."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder, ".")
    return content.getvalue()


def script_command(script: Path, place: str) -> list[str]:
    """The command that runs a script at this place in an image, also if its mode does not allow that."""
    with open_regular(script) as file:
        first = file.readline(256).decode(errors="replace")
    return [*shlex.split(first[2:]), place] if first.startswith("#!") else ["sh", place]


def with_variables(variables: dict[str, str]) -> list[str]:
    """The begin of a command with these environment variables."""
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []


@lru_cache
def _places(count: int) -> asyncio.Semaphore:
    """Of this process, which has one event loop."""
    return asyncio.Semaphore(count)


@lru_cache
def boxes() -> Sandboxes:
    """Of this process. Raises UserError if this machine has none in images."""
    return Sandboxes(SandboxLimits(root="images"))

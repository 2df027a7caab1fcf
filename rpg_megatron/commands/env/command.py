"""``rpg-megatron env check``: whether the tests of tasks tell a solution from none."""

from __future__ import annotations

import asyncio
import math
import re
import time
from pathlib import Path
from typing import NamedTuple

from rpg_megatron.config.errors import UserError
from rpg_megatron.environments.harbor import (
    ImageSettings,
    Tested,
    boxes,
    open_task,
    pack,
    script_command,
)
from rpg_megatron.environments.harbor_tasks import HarborTask, find_tasks

_NO_NETWORK = re.compile(
    r"name resolution|resolve host|Name or service not known|[Nn]etwork is unreachable|"
    r"socket: Operation not permitted|No route to host|Operation not permitted.*socket|"
    r"socket.*Operation not permitted|/dev/(tcp|udp)/|Failed to (fetch|establish)|Max retries exceeded"
)
"""What programs write that want a network."""


class _Run(NamedTuple):
    """Tests after the reference solution, or after none."""

    tested: Tested
    output: str
    """Of the solution."""
    ended: str


def check_tasks(
    folder: Path, images: Path | None, settings: ImageSettings, *, seconds: float | None, network: bool
) -> int:
    """Print what is wrong with each task in a folder; the number of bad ones.

    seconds: limit of a solution and of tests, besides their own. network: see ``cli``. Raises UserError.
    """
    tasks, unmapped, refused = find_tasks(str(folder), str(images) if images else None)
    if not tasks and not unmapped and not refused:
        raise UserError(
            f"no folder below {folder} has a task.toml; give a folder with tasks of Harbor's format"
        )
    bad = {name.partition(" ")[0]: f"has no image: {name}; name one in images" for name in unmapped} | refused
    boxes()  # a machine without sandboxes is told before any task
    limit = seconds or math.inf
    capped = [
        t._replace(seconds=min(t.seconds or 3600.0, limit), test_seconds=min(t.test_seconds, limit))
        for t in tasks
    ]
    bad |= asyncio.run(_check_all(capped, settings, network))
    keys = sorted({key for task in tasks for key in task.not_used})
    for key in keys:
        count = sum(key in task.not_used for task in tasks)
        print(f"not used: {key}, in {count} tasks")
    for name, what in sorted(bad.items()):
        print(f"bad: {name}: {what}")
    total = len(tasks) + len(unmapped) + len(refused)
    print(f"{total - len(bad)} of {total} tasks give 1 with their solution and 0 without")
    return len(bad)


async def _check_all(tasks: list[HarborTask], settings: ImageSettings, network: bool) -> dict[str, str]:
    places, done = asyncio.Semaphore(settings.at_once), 0
    bad: dict[str, str] = {}

    async def check(task: HarborTask) -> None:
        nonlocal done
        async with places:
            began = time.monotonic()
            try:
                wrong = await _what_is_wrong(task, settings, network)
            except (UserError, OSError) as e:
                wrong = str(e)
        done += 1
        took = f"{time.monotonic() - began:.1f} s"
        print(f"[{done}/{len(tasks)}] {task.folder.name}: {wrong or 'good'} ({took})", flush=True)
        if wrong:
            bad[task.folder.name] = wrong

    await asyncio.gather(*map(check, tasks))
    return bad


async def _what_is_wrong(task: HarborTask, settings: ImageSettings, network: bool) -> str:
    if not (task.folder / "solution/solve.sh").is_file():
        return "has no solution/solve.sh"
    empty = (await _run(task, settings, solve=False)).tested
    if empty.ended:
        return f"never ends: tests without a solution, {empty.reason}"
    if empty.reward:
        return f"passes without a solution: reward {empty.reward:g}"
    solved = await _run(task, settings, solve=True)
    if solved.tested.reward == 1.0:
        return ""
    said = solved.output + solved.tested.output
    if network and (await _run(task, settings, solve=True, network=True)).tested.reward == 1.0:
        return "needs a network: with one, its solution passes"
    if _NO_NETWORK.search(said):
        return f"needs a network: {_end_of(said)}"
    if solved.ended or solved.tested.ended:
        which = "solution" if solved.ended else "tests"
        return f"never ends: {which}, ended: limit of {solved.ended or solved.tested.ended}"
    reward = "no reward" if solved.tested.reward is None else f"reward {solved.tested.reward:g}"
    return f"solution fails: {reward}, {solved.tested.reason}; {_end_of(said)}"


async def _run(task: HarborTask, settings: ImageSettings, *, solve: bool, network: bool = False) -> _Run:
    output = ended = ""
    async with open_task(task, settings, network=network) as opened:
        if solve:
            script = task.folder / "solution/solve.sh"
            await opened.sandbox.give({"/solution": await asyncio.to_thread(pack, script.parent)})
            variables = [f"{name}={value}" for name, value in task.solution_variables.items()]
            command = [
                *(["env", *variables] if variables else []),
                *script_command(script, "/solution/solve.sh"),
            ]
            result = await opened.run(command, task.seconds or 3600.0)
            output, ended = result.output, result.ended
        return _Run(await opened.test(), output, ended)


def _end_of(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-2:])[-200:] or "nothing is printed"

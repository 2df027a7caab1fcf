"""``rpg-megatron env check``: whether the tests of tasks tell a solution from none."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from pathlib import Path

from rpg_megatron.config.errors import UserError
from rpg_megatron.environments import harbor
from rpg_megatron.environments.harbor import ImageSettings, Tested
from rpg_megatron.environments.harbor_tasks import HarborTask, find_tasks
from rpg_megatron.environments.sandbox import SandboxResult

_NO_NETWORK = re.compile(
    r"name resolution|resolve host|Name or service not known|[Nn]etwork is unreachable|"
    r"socket: Operation not permitted|No route to host|Operation not permitted.*socket|"
    r"socket.*Operation not permitted|/dev/(tcp|udp)/|Failed to (fetch|establish)|Max retries exceeded"
)
"""What programs write that want a network."""


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
    bad = {
        name.rpartition(" (")[0]: f"has no image: {name}; name one in images" for name in unmapped
    } | refused
    harbor.boxes()  # a machine without sandboxes is told before any task
    limit = seconds or math.inf
    capped = [
        t._replace(seconds=min(t.seconds or 3600.0, limit), test_seconds=min(t.test_seconds, limit))
        for t in tasks
    ]
    bad |= asyncio.run(_check_all(capped, settings, network))
    for key, count in sorted(Counter(key for task in tasks for key in task.not_used).items()):
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
    _, empty = await _run(task, settings, solve=False)
    if empty.ended:
        return f"never ends: tests without a solution, {empty.reason}"
    if empty.reward:
        return f"passes without a solution: reward {empty.reward:g}"
    solution, tested = await _run(task, settings, solve=True)
    if tested.reward == 1.0:
        return ""
    said = solution.output + tested.output
    if network and (await _run(task, settings, solve=True, network=True))[1].reward == 1.0:
        return "needs a network: with one, its solution passes"
    if _NO_NETWORK.search(said):
        return f"needs a network: {_end_of(said)}"
    if ended := solution.ended or tested.ended:
        return f"never ends: {'solution' if solution.ended else 'tests'}, ended: limit of {ended}"
    reward = "no reward" if tested.reward is None else f"reward {tested.reward:g}"
    return f"solution fails: {reward}, {tested.reason}; {_end_of(said)}"


async def _run(
    task: HarborTask, settings: ImageSettings, *, solve: bool, network: bool = False
) -> tuple[SandboxResult, Tested]:
    """The reference solution or nothing, then the tests."""
    result = SandboxResult("", 0)
    async with harbor.open_task(task, settings, network=network) as opened:
        if solve:
            script = task.folder / "solution/solve.sh"
            await opened.sandbox.give({"/solution": await asyncio.to_thread(harbor.pack, script.parent)})
            command = harbor.with_variables(task.solution_variables)
            command += harbor.script_command(script, "/solution/solve.sh")
            result = await opened.run(command, task.seconds or 3600.0)
        return result, await opened.test()


def _end_of(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-2:])[-200:] or "nothing is printed"

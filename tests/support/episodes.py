"""Episodes for tests, named by import path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rpg_megatron.rollout.episode import Episode, EpisodeLost, EpisodeTask, Generate, ScoreText, TokenLimit

BETWEEN = (40, 41, 42)
"""Tokens that follow a turn."""


async def three_turns(task: EpisodeTask, generate: Generate, score: ScoreText, longest: int = 20) -> Episode:
    """Up to three turns with ``BETWEEN`` after each; the run's reward."""
    context = task.prompt
    for _ in range(3):
        turn = await generate(context, max_tokens=longest)
        context = turn.context + BETWEEN
    return Episode()


async def some_slow(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """One to four turns; one of sixteen waits between its turns, for much longer than others take."""
    turns, context = 1 + task.seed % 4, task.prompt
    for _ in range(turns):
        context = (await generate(context, max_tokens=10)).context + BETWEEN
        await asyncio.sleep(0.3 * (task.seed % 16 == 3))
    return Episode()


async def until_the_limit(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """Turns until no token is left."""
    context = task.prompt
    while True:
        context = (await generate(context)).context


async def numbered(
    task: EpisodeTask, generate: Generate, score: ScoreText, turns: int = 100, ended: str = "passes"
) -> Episode:
    """Turns with a number as reward; those with an odd seed want no more than one. ended: what becomes of a
    limit: it passes, is caught or is another exception.
    """
    context, wanted = task.prompt, 1 if task.seed % 2 else turns
    try:
        for _ in range(wanted):
            context = (await generate(context, max_tokens=5)).context + BETWEEN
    except TokenLimit:
        match ended:
            case "none":
                return Episode()
            case "score":
                return Episode(await score("x"))
            case "raises":
                raise KeyError("choices") from None
        raise
    return Episode(await score("2") if ended == "score kind" else 1.5)


async def scored(task: EpisodeTask, generate: Generate, score: ScoreText, kind: str = "number") -> Episode:
    """One turn; its reward is a number, what ``score`` returns, or either."""
    turn = await generate(task.prompt)
    reward = await score(turn.text)
    as_number = kind == "number" or (kind == "either" and task.seed % 2 == 0)
    return Episode(len(turn.tokens) / 100 if as_number else reward)


async def faulty(task: EpisodeTask, generate: Generate, score: ScoreText, fault: str) -> Any:
    """Everything that an episode can do wrong."""
    if fault == "no turn":
        return Episode()
    turn = await generate(task.prompt[:-1] if fault == "shorter" else task.prompt, 4)
    match fault:
        case "nothing":
            return None
        case "raises":
            raise KeyError("a tool")
        case "encoded again":
            await generate((*task.prompt, 1, 2, *turn.tokens))
        case "text":
            await generate("again")  # type: ignore[arg-type]
        case "ragged":
            await generate([task.prompt, (1,)])  # type: ignore[list-item]
        case "numbers":
            await generate((*turn.context, 1.5))  # type: ignore[arg-type]
        case "unknown token":
            await generate((*turn.context, 10**6))
        case "no limit":
            await generate(turn.context, 0)
        case "two at once":
            await asyncio.gather(generate(turn.context), generate(turn.context))
        case "cancelled":
            raise asyncio.CancelledError
        case "not finite":
            return Episode(float("nan"))
        case "own name":
            return Episode(1.0, {"turns": 1.0})
        case "half a character":
            raise ValueError("\ud800")
        case "exits":
            sys.exit(3)
    return Episode()


async def told(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """Two turns; correct if the task says what the test expects."""
    turn = await generate(task.prompt, 3)
    await generate(turn.context + BETWEEN)
    round_trip = task.decode(task.encode("ab"))
    inputs = (task.text, task.answer, task.row, task.max_tokens, task.held_out, round_trip)
    return Episode(1.0 if inputs == ("What is 1+1?", "2", {"level": 3}, 64, "amc", "ab") else -1.0)


at_work = asyncio.Event()
"""Set by a test when an engine works on the turns that ``impatient`` gives up."""
given_up: list[int] = []
"""Seeds of the samples whose turn was given up."""


async def impatient(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """Gives a turn up while an engine works on it, then asks for another."""
    turn = asyncio.ensure_future(generate(task.prompt + BETWEEN))
    await at_work.wait()
    turn.cancel()
    await asyncio.wait([turn])
    given_up.append(task.seed)
    await generate(task.prompt)
    return Episode()


async def branching(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """Five turns in three rows; the third turn continues the first one, the fifth the second one."""
    first = await generate(task.prompt, 5)
    second = await generate((*task.prompt, *BETWEEN), 5, branch=True)
    await generate(first.context + BETWEEN, 5, branch=True)
    await generate(task.encode("another prompt"), 5, branch=True)
    await generate(second.context + BETWEEN, 5)
    return Episode()


async def unruly(
    task: EpisodeTask, generate: Generate, score: ScoreText, fault: str, seeds: list[int]
) -> Episode:
    """Two turns; between them, those with these seeds do what ends or blocks a process."""
    turn = await generate(task.prompt, 5)
    if task.seed in seeds:
        match fault:
            case "crash":
                os._exit(1)
            case "block":
                time.sleep(1000)
            case "wait":
                await asyncio.sleep(1000)
            case "wait, deaf":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(1000)
            case "memory":
                bytearray(1 << 40)
            case "lost":
                raise EpisodeLost("a server")
            case "lost once" if not Path("lost").exists():
                Path("lost").touch()
                raise EpisodeLost("a server")
            case "kill once":
                mark = Path("killed")
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    await generate(turn.context + BETWEEN, 5)
    return Episode(float(len(turn.tokens)), {"first": len(turn.tokens)})


async def _no_client(task: EpisodeTask) -> float:
    raise NotImplementedError


client: Callable[[EpisodeTask], Awaitable[float]] = _no_client
"""Set by a test: what a client of the gateway does, and the reward."""


async def client_chat(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """Runs ``client``."""
    return Episode(await client(task))

"""Episodes for tests, named by import path."""

from __future__ import annotations

import asyncio
from typing import Any

from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText

BETWEEN = (40, 41, 42)
"""Tokens that follow a turn."""


async def three_turns(task: EpisodeTask, generate: Generate, score: ScoreText, longest: int = 20) -> Episode:
    """Up to three turns with ``BETWEEN`` after each; the run's reward."""
    context = task.prompt
    for _ in range(3):
        turn = await generate(context, max_tokens=longest)
        context = turn.context + BETWEEN
    return Episode()


async def scored(task: EpisodeTask, generate: Generate, score: ScoreText, kind: str = "number") -> Episode:
    """One turn; its reward is a number, what ``score`` returns, or either."""
    turn = await generate(task.prompt)
    found = await score(turn.text)
    as_number = kind == "number" or (kind == "either" and task.seed % 2 == 0)
    return Episode(len(turn.tokens) / 100 if as_number else found)


async def faulty(task: EpisodeTask, generate: Generate, score: ScoreText, fault: str) -> Any:
    """What an episode can do wrong."""
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
    return Episode()

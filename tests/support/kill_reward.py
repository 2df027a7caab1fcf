"""A reward function and an episode for runs with kills: in worker processes, slow enough to kill them."""

from __future__ import annotations

import asyncio
import time

from rpg_megatron.rewards.extraction import find_answer
from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText


def is_correct(response: str, answer: str) -> bool:
    time.sleep(0.005)
    return find_answer(response) == answer


async def two_turns(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    turn = await generate(task.prompt, max_tokens=task.max_tokens // 3)
    await asyncio.sleep(0.05)
    await generate(turn.context + task.encode(" so Answer: "), max_tokens=task.max_tokens // 3)
    return Episode()

"""Episodes of the benchmarks, which run in worker processes: the module imports little."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import aiohttp

from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText

type Route = Literal["generate", "chat", "tokens"]
QUESTION = "Compute 123+456\n"


async def response_of_length(
    task: EpisodeTask, generate: Generate, score: ScoreText, mean: float = 64.0, sigma: float = 1.0
) -> Episode:
    """An episode whose length is log-normal, as in long reasoning, and determined by its seed.

    A response that ends too early is continued after its end. mean: of the length, tokens, before it is cut
    at the token limit. sigma: standard deviation of its logarithm.
    """
    length = random.Random(task.seed).lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    remaining, context = min(max(1, round(length)), task.max_tokens), task.prompt
    while remaining:
        turn = await generate(context, max_tokens=remaining)
        remaining, context = remaining - len(turn.tokens), turn.context
    return Episode()


async def talk(
    task: EpisodeTask,
    generate: Generate,
    score: ScoreText,
    route: Route = "chat",
    turns: int = 4,
    context: int = 8192,
) -> Episode:
    """Turns after a first message of ``context`` tokens."""
    text = task.decode([*task.encode(QUESTION)] * (context // len(task.encode(QUESTION))))
    url = task.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        tokens = task.encode(text)
        for _ in range(turns):
            if route == "generate":
                tokens = (await generate([*tokens], branch=True)).context + task.encode(QUESTION)
            elif route == "tokens":
                body: dict[str, Any] = {"token_ids": tokens}
                async with http.post(url + "/inference/v1/generate", json=body) as answer:
                    sampled = (await answer.json())["choices"][0]["token_ids"]
                    tokens = (*tokens, *sampled, *task.encode(QUESTION))
            else:
                async with http.post(url + "/v1/chat/completions", json={"messages": messages}) as answer:
                    messages.append((await answer.json())["choices"][0]["message"])
                    messages.append({"role": "user", "content": QUESTION})
    return Episode(1.0)

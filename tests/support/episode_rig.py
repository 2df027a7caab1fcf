"""A sampler worker with stand-in engines, for tests of episodes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineUnavailable, Sample
from rpg_megatron.rollout.episode_pool import EpisodeRunner
from rpg_megatron.rollout.groups import Generated, GroupScores, GroupTask
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.rollout.worker_files import CODEC
from tests.support.stand_in_engines import ByteTokenizer, write_byte_codec

PROMPT = b"What is 1+1?"
Request = dict[str, Any]


class Engine:
    """Answers a few digits and 0, drawn from prompt and seed, after a random delay."""

    def __init__(self, rng: random.Random, lives: int = 10**6):
        """lives: number of requests until it fails."""
        self.rng, self.lives = rng, lives
        self.requests: list[Request] = []
        self.answered = 0

    async def generate(self, prompt: np.ndarray, *, n: int, **request: Any) -> list[Sample]:
        self.requests.append({"prompt": prompt.tolist(), "n": n} | request)
        await asyncio.sleep(0.003 * self.rng.random())
        self.lives -= 1
        if self.lives < 0:
            raise EngineUnavailable("gone")
        self.answered += n
        return [self._one(prompt.tolist(), request["seed"] + i, request["max_tokens"]) for i in range(n)]

    def _one(self, prompt: list[int], seed: int, most: int) -> Sample:
        draw = random.Random(f"{prompt} {seed}")
        tokens = [*(draw.randrange(48, 58) for _ in range(draw.randrange(1, 9))), 0][:most]
        values = np.array([-draw.random() for _ in tokens], np.float32)
        return Sample(np.array(tokens, np.int32), values, "stop" if tokens[-1] == 0 else "length")


def make_settings(config_file: Path, episode: str, **keys: Any) -> Settings:
    section = ", ".join(f"{key}: {value}" for key, value in {"type": episode, **keys}.items())
    return load_settings(config_file, [f"rollout.episode={{{section}}}", "rollout.max_response_tokens=64"])


def make_task(**changes: Any) -> GroupTask:
    prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int32)
    fields = {"ticket": 7, "samples": 3, "seed": 1000, "max_tokens": 64, "version": 5} | changes
    return GroupTask(prompt_id=0, prompt=prompt, answer="2", **fields)


def sample(
    settings: Settings,
    engines: list[Engine],
    folder: Path,
    task: GroupTask | None = None,
    episode: EpisodeRunner | None = None,
) -> tuple[list[Trajectory], GroupScores]:
    """Sample a group, on the next engine after each failure. episode: None: in worker processes."""

    async def run() -> tuple[list[Trajectory], GroupScores]:
        clients: Any = engines
        write_byte_codec(folder / CODEC)
        worker = Worker(settings, codec_of(ByteTokenizer()), clients, folder, [0], episode)
        group_task = task or make_task()
        try:
            async with asyncio.timeout(120):
                progress, number = Generated(False), -1
                while not progress.complete:
                    number += 1
                    progress = await worker.generate(group_task, number % len(engines), 0)
                scores = await worker.score(7)
                rows = len(scores.rows) or group_task.samples
                return await worker.fetch([7] * rows, list(range(rows))), scores
        finally:
            worker.close()

    return asyncio.run(run())


def contents(group: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [(t.response.tolist(), t.mask.tolist(), t.behaviour.tolist(), t.text, t.reward) for t in group]

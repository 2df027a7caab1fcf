"""Settings, engines and rewards for a sampler in the process of a test."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.rollout import DynamicSamplingSettings
from rpg_megatron.engine.client import EngineError, Sample


class FakeEngine:
    """Answers "Answer: <digit>" after a random delay; the digit and the log-probs come from the seed."""

    def __init__(self, index: int, rng: random.Random, fail_after: int | None = None):
        self.index, self.rng, self.fail_after = index, rng, fail_after
        self.requests: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def generate(self, prompt_tokens: np.ndarray, **request: Any) -> list[Sample]:
        self.requests.append({"prompt": prompt_tokens.tolist()} | request)
        self.running += request["n"]
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.rng.random() * 0.01)
        self.running -= request["n"]
        if self.fail_after is not None and len(self.requests) > self.fail_after:
            raise EngineError(f"engine {self.index} is gone")
        return [self.sample(request["seed"] + i, request["logprobs"]) for i in range(request["n"])]

    async def metrics(self, timeout: float) -> dict[str, float]:
        raise EngineError("there are none")

    async def wait_ready(self, timeout: float) -> None:
        """Ready at once."""

    async def close(self) -> None:
        """Nothing to close."""

    async def is_progressing(self, timeout: float) -> bool:
        return True

    def sample(self, seed: int, logprobs: bool) -> Sample:
        draw = random.Random(seed)
        tokens = np.frombuffer(f"Answer: {draw.randint(0, 9)}".encode() + b"\0", np.uint8).astype(np.int32)
        values = [-draw.random() for _ in tokens] if logprobs else []
        return Sample(tokens, np.array(values, np.float32), draw.choice(["stop", "length"]))


def sampler_settings(config_file: Path) -> Settings:
    """6 prompts a step, 5 responses each, 8 at once."""
    overrides = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=5", "engine.max_sequences=8"]
    data = config_file.parent / "train.jsonl"
    evaluation = f"evaluation={{data: {{path: {data}, max_prompt_tokens: 99}}, samples: 3, temperature: 0.5}}"
    return load_settings(config_file, [*overrides, evaluation, "training.minibatches=2"])


def engines(seed: int, count: int = 2) -> list[FakeEngine]:
    return [FakeEngine(i, random.Random(100 * seed + i)) for i in range(count)]


def dynamic(settings: Settings, reward: str, **options: object) -> Settings:
    """With a reward function that sees the last digit of the response; 4 prompts a step, 5 responses each."""
    rollout = {"prompts_per_step": 4, "dynamic": DynamicSamplingSettings(**options)}
    return settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update=rollout),
            "reward": RewardSettings(type=f"digit_reward:{reward}"),
        }
    )


def write_rewards(folder: Path) -> None:
    """The module of ``dynamic``."""
    (folder / "digit_reward.py").write_text(
        "def right(response, answer): return True\n"
        "def wrong(response, answer): return False\n"
        "def mixed(response, answer): return int(response[-1]) < 2 and answer not in ('0', '2')\n"
        "def even(response, answer): return int(response[-1]) % 2 == 0\n"
        "def odd(response, answer): return int(response[-1]) > 4 or None\n"
        "def never(response, answer): raise KeyError(response)\n"
    )

"""Cost of an agent's turns in a sampler worker, by route: ``generate``, chat completions, token ids."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.episodes import QUESTION
from benchmarks.setup import ROOT, Report, benchmark, main
from rpg_megatron.config import load_settings
from rpg_megatron.data.prompts import codec_of, load_tokenizer, save_chat_template, save_codec
from rpg_megatron.engine.client import Sample
from rpg_megatron.rollout.gateway import CHAT
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.rollout.worker_files import CODEC

SAMPLED = 64
"""Tokens of a turn."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Engine:
    """Answers at once, with random digits."""

    def __init__(self, stop: int):
        self._stop = stop

    async def generate(self, prompt: np.ndarray, *, n: int, **request: Any) -> list[Sample]:
        """The answers to one request."""
        draw = random.Random(request["seed"])
        digits = [draw.randrange(18, 28) for _ in range(SAMPLED - 1)]
        tokens, values = np.array([*digits, self._stop], np.int32), np.full(SAMPLED, -1, np.float32)
        return [Sample(tokens, values, "stop")] * n


@benchmark(episodes=16, turns=2)
def agents(report: Report, episodes: int = 512, turns: int = 4, context: int = 8192) -> None:
    """CPU time and memory of a sampler worker with many episodes at once, and engines that answer at once.

    Every episode begins with a message of ``context`` tokens, and its turns have 64. CPU is the worker's
    alone: the episodes have processes of their own, and so has the chat template. Memory: by which the worker
    grew, for each episode.
    """
    table = report.table("route", "episodes", "CPU a turn, ms|.2f", "template, ms|.2f", "KiB an episode|.0f")
    for route in ("generate", "tokens", "chat"):
        with tempfile.TemporaryDirectory() as name:
            cpu, template, memory = asyncio.run(measure(Path(name), route, episodes, turns, context))
        table.row(
            route, episodes, 1e3 * cpu / (episodes * turns), 1e3 * template / (episodes * turns), memory
        )


async def measure(
    work: Path, route: str, episodes: int, turns: int, context: int
) -> tuple[float, float, float]:
    """CPU seconds of the worker and of the template's process, and KiB for each episode."""
    section = f"{{type: benchmarks.episodes:talk, route: {route}, turns: {turns}, context: {context}}}"
    keys = [f"rollout.episode={section}", f"rollout.max_response_tokens={2 * context}"]
    settings = load_settings(ROOT / "examples" / "quickstart.yaml", keys)
    tokenizer = load_tokenizer(settings.model.path)
    tokenizer.chat_template = TEMPLATE
    save_codec(tokenizer, work / CODEC)
    save_chat_template(tokenizer, settings.data, work / CHAT)
    codec, engines = codec_of(tokenizer), [Engine(tokenizer.eos_token_id)]
    worker = Worker(settings, codec, engines, work, [tokenizer.eos_token_id])  # type: ignore[arg-type]
    prompt = np.array(codec.encode(QUESTION), np.int32)
    me = psutil.Process()

    def task(ticket: int, samples: int) -> GroupTask:
        return GroupTask(ticket, 0, prompt, "1", samples, ticket << 16, 2 * context, version=0)

    try:
        await worker.generate(task(0, 1), 0, 0)
        before, others, size = time.process_time(), children_time(me), me.memory_info().rss
        groups = [task(1 + number, 8) for number in range(episodes // 8)]
        await asyncio.gather(*(worker.generate(group, 0, 0) for group in groups))
        cpu, template = time.process_time() - before, children_time(me) - others
        for group in groups:
            scores = await worker.score(group.ticket)
            assert scores.failures.failed == 0, scores.failures
            assert scores.lengths == [SAMPLED * turns] * 8
            assert len(scores.rows) == 8  # no branch
        return cpu, template, (me.memory_info().rss - size) / 1024 / episodes
    finally:
        worker.close()


def children_time(process: psutil.Process) -> float:
    """CPU seconds of the children that render chat templates."""
    children = [c for c in process.children(recursive=True) if "chat_template" in " ".join(c.cmdline())]
    return sum(sum(child.cpu_times()[:2]) for child in children)


if __name__ == "__main__":
    main(__doc__, agents)

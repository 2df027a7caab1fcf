"""What replaying the engine's experts does to the mismatch of log-probs: see docs/mixture-of-experts.md.

``python -m benchmarks.router_replay`` makes a mixture of 8 layers with 32 experts each, of which a token
takes 4 (random weights), samples from it with a real engine on a CPU in float32 and in bfloat16, and scores
the responses by the trainer in the same precision, with its own choice of experts and with the engine's. It
prints the share of choices (one for each token and layer) that differ and of tokens with one that does, and
|old - behaviour| in nats: mean, 99th percentile and maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rpg_megatron.config import ModelShape, Settings, read_model_shape
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.models.registry import mapping_for
from tests.support.engine import running_engines
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_checkpoint

SHAPE = ModelShape(
    family="qwen3_moe",
    num_layers=8,
    hidden_size=128,
    ffn_hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=256,
    tied_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=512,
    dtype="float32",
    experts=ExpertShape(32, 4, 64, True, tuple(range(8))),
)
PROMPTS = (5, 17, 40, 3, 9, 25, 12, 30)
"""Tokens of each."""


class Row(NamedTuple):
    """One precision."""

    dtype: str
    tokens: int
    """Sampled tokens."""
    changed: float
    changed_tokens: float
    own: tuple[float, float, float]
    """Mean, 99th percentile, maximum of |old - behaviour| with the trainer's own choice of experts."""
    replayed: tuple[float, float, float]


def settings_for(model: Path, dtype: str) -> Settings:
    """Settings of engine and trainer."""
    return Settings.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "data": {"path": "unused", "max_prompt_tokens": 64},
            "precision": {"dtype": dtype},
            "optimizer": {"distributed": False},
            "training": {"router_replay": "rollout"},
            "rollout": {"prompts_per_step": 16, "max_response_tokens": 128},
            "engine": {
                "max_sequences": 64,
                "kv_cache_gib": 0.25,
                "cpu_threads": 1,
                "arguments": ["--skip-tokenizer-init"],
            },
        }
    )


def make_checkpoint(folder: Path, shape: ModelShape, noise: float = 0.1) -> None:
    """Random weights; norms are not ones."""
    random = np.random.default_rng(0)
    weights = {
        name: (1 + noise * random.normal(size=size) if len(size) == 1 else noise * random.normal(size=size))
        for name, size in mapping_for(shape).hf_tensors().items()
    }
    write_checkpoint(folder, shape, {n: w.astype(np.float32) for n, w in weights.items()})


def sample(settings: Settings, folder: Path, responses: int) -> list[Trajectory]:
    """Responses of a real engine with the checkpoint's weights, with routes."""
    shape = read_model_shape(settings.model.path)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, shape.vocab_size, n).astype(np.int32) for n in PROMPTS]

    async def ask(socket: Path, token: str) -> list[Any]:
        client = EngineClient(0, socket, token, timeout=1800, experts=shape.experts)
        longest = settings.rollout.max_response_tokens
        try:
            return await asyncio.gather(
                *[
                    client.generate(p, n=responses, max_tokens=longest, temperature=1.0, seed=1000 * i)
                    for i, p in enumerate(prompts)
                ]
            )
        finally:
            await client.close()

    with running_engines(folder, [settings], weights="checkpoint") as (engine,):
        found = asyncio.run(ask(engine.process.socket, engine.token))
    return [
        Trajectory(
            prompt_id=i,
            sample=k,
            prompt=prompt,
            response=s.tokens,
            behaviour=s.logprobs,
            versions=np.zeros(len(s.tokens), np.int32),
            finish=s.finish,
            text="",
            routes=s.routes,
        )
        for i, (prompt, group) in enumerate(zip(prompts, found, strict=True))
        for k, s in enumerate(group)
    ]


def score(folder: Path) -> None:
    """On a trainer rank: score the trajectories in ``folder`` with and without replay, into result.json."""
    from rpg_megatron.policy.device import start_device, start_process_group
    from rpg_megatron.policy.model import start_mesh
    from rpg_megatron.policy.router_replay import count_changes
    from tests.support.rank_policy import checkpoint_policy

    device = start_device("cpu")
    start_process_group(device)
    settings, trajectories = pickle.loads((folder / "sampled.pkl").read_bytes())
    mesh = start_mesh(settings.parallel)
    policy = checkpoint_policy(settings, mesh, device)
    assert policy.replayed is not None
    packs = [policy.pack(trajectories[i : i + 16]) for i in range(0, len(trajectories), 16)]
    for pack in packs:
        assert pack.packed.routes is not None
        pack.packed.routes.start_counting()

    def gaps(packs: Sequence[Any]) -> Iterator[np.ndarray[Any, Any]]:
        for pack, values in zip(packs, policy.logprobs(packs), strict=True):
            for t, logp in pack.split(values[0]):
                yield np.abs(logp.numpy().astype(np.float64) - t.behaviour)

    replayed = np.concatenate(list(gaps(packs)))
    changes = count_changes(packs, policy.replayed, mesh)
    own = np.concatenate(list(gaps([pack.without_routes() for pack in packs])))
    result = {
        name: [float(f) for f in (x.mean(), np.quantile(x, 0.99), x.max())]
        for name, x in (("own", own), ("replayed", replayed))
    }
    (folder / "result.json").write_text(json.dumps(result | changes | {"tokens": len(own)}))


def measure(folder: Path, dtype: str, responses: int = 16, shape: ModelShape = SHAPE) -> Row:
    """Sample and score in one precision; 8 x responses responses."""
    folder.mkdir()
    make_checkpoint(folder / "model", shape)
    settings = settings_for(folder / "model", dtype)
    trajectories = sample(settings, folder, responses)
    (folder / "sampled.pkl").write_bytes(pickle.dumps((settings, trajectories)))
    found = run_ranks("benchmarks.router_replay", 1, folder, "--score", timeout=1800)
    return Row(
        dtype,
        found["tokens"],
        found["routes/changed"],
        found["routes/changed_tokens"],
        tuple(found["own"]),
        tuple(found["replayed"]),
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="mismatch with and without router replay")
    parser.add_argument("folder", nargs="?", type=Path, help="where to keep what is sampled")
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.score:
        return score(arguments.folder)
    print("| engine and trainer | choices that differ | tokens with one | experts | mean | p99 | max |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float32", "bfloat16"):
            row = measure((arguments.folder or Path(scratch)) / dtype, dtype)
            for kind, gap in (("the trainer's", row.own), ("replayed", row.replayed)):
                numbers = " | ".join(f"{x:.1e}" for x in gap)
                counts = f"{row.changed:.2%} | {row.changed_tokens:.1%}" if kind != "replayed" else " | "
                print(f"| {dtype}, {row.tokens} tokens | {counts} | {kind} | {numbers} |", flush=True)
    return None


if __name__ == "__main__":
    main()

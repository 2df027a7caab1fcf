"""How far two computations of the same log-probs and gradients differ: precisions, and engine against
trainer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.policies import SHAPES, batch_of, build, forget, on_rank, sized, start, trajectory_of
from benchmarks.policies import write_checkpoint as write_random
from benchmarks.setup import Table, benchmark, main
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.layer import FUSED
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.tiny_models import write_checkpoint

RECIPES = ("blockwise", "tensorwise", "delayed", "blockwise+params", "tensorwise+params")
EMULATED = RECIPES[:3]
"""Recipes that a CPU can emulate."""
SECTIONS = {"training": {"tokens_per_microbatch": 8192}, "optimizer": {"clip_grad": 0.0}}
"""Settings of a policy whose numbers are compared."""


# -- precisions ----------------------------------------------------------------------------------------------


@benchmark(device="cpu", shape="tiny", lengths=(40, 30), recipes=("blockwise",))
def precisions(
    shape: Literal["0.6b", "4b", "29m", "tiny"] = "0.6b",
    layers: int | None = None,
    lengths: tuple[int, ...] = (100, 1000, 2000),
    recipes: tuple[str, ...] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
) -> None:
    """Log-probs and gradients of each precision against bfloat16; on a CPU, FP8 is emulated.

    One micro-batch of random sequences through a random checkpoint. Log-probs: mean and largest difference
    in nats, and the norm of the difference over the norm; the latter also for the gradient of all parameters
    together. float32 uses Megatron's own layers, as on a CPU. Delayed scaling has two rows: with the initial
    scales of 1, and with those after one update.
    """
    place, mesh = start(device)
    model = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    batch = batch_of(lengths, model.vocab_size)
    with tempfile.TemporaryDirectory() as work:
        folder = write_random(Path(work) / "model", model)

        def policy_in(precision: str) -> Policy:
            forget()
            return build(model, mesh, place, precision, folder, **SECTIONS)

        base = numbers(policy_in("bf16"), batch)
        columns = ("against bfloat16", "log-probs: mean, nats|.4f", "largest|.3f", "relative|.2%")
        table = Table(*columns, "gradient|.1%", title=shape)

        def row(name: str, logp: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
            gap = logp - base[0]
            relative = None if gradient is None else ((gradient - base[1]).norm() / base[1].norm()).item()
            mean, largest = gap.abs().mean().item(), gap.abs().max().item()
            table.row(name, mean, largest, (gap.norm() / base[0].norm()).item(), relative)

        row("float32", *numbers(policy_in("fp32"), batch))
        row("transformers in bfloat16", by_transformers(folder, batch, place))
        for recipe in recipes or (RECIPES if device == "cuda" else EMULATED):
            policy = policy_in(recipe)
            values = numbers(policy, batch)
            if recipe == "delayed":
                row("delayed, with scales of 1", *values)
                values = numbers(policy, batch)
            row(recipe, *values)
            del policy


def numbers(policy: Policy, batch: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all response tokens, and the gradient, by parameter: flat, float32, on the CPU."""
    pack = policy.pack(batch)
    (scored,) = policy.logprobs([pack])
    logp = torch.cat([part for _, part in pack.split(scored[0])]).cpu()
    for t, part in pack.split(scored[0]):
        t.old = t.anchor = part.cpu().numpy().copy()
    loss, aggregator = build_loss(policy.settings), build_aggregator(policy.settings)
    with policy.updating():
        policy.update([policy.pack(batch)], loss, aggregator, lr=0.0)
    grads = {_local_name(name): p.main_grad for name, p in policy.named_parameters()}
    return logp, torch.cat([grads[name].flatten().float().cpu() for name in sorted(grads)])


def _local_name(name: str) -> str:
    """The name of a Transformer Engine parameter in Megatron's own layers."""
    for fused, local in FUSED.items():
        name = name.replace(fused, local)
    return name


def by_transformers(folder: Path, batch: list[Trajectory], device: torch.device) -> torch.Tensor:
    """Log-probs of all response tokens by transformers in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    logps = []
    with torch.no_grad():
        for t in batch:
            tokens = torch.tensor([*t.prompt.tolist(), *t.response.tolist()], device=device)
            logits = model(tokens[None]).logits[0, len(t.prompt) - 1 : -1].float()
            logps.append(logits.log_softmax(-1).gather(1, tokens[len(t.prompt) :, None])[:, 0].cpu())
    return torch.cat(logps)


# -- router replay -------------------------------------------------------------------------------------------

EXPERTS = sized(
    *(8, 128, 128, 4, 2, 32, 256), family="qwen3_moe", tied_embeddings=False, max_positions=512,
    dtype="float32", experts=ExpertShape(32, 4, 64, True, tuple(range(8))),
)  # fmt: skip
PROMPTS = (5, 17, 40, 3, 9, 25, 12, 30)
"""Lengths in tokens."""


class Row(NamedTuple):
    """One precision."""

    tokens: int
    """Sampled tokens."""
    changed: float
    """Share of choices (one for each token and layer) that differ."""
    changed_tokens: float
    """Share of tokens with a choice that differs."""
    own: tuple[float, float, float]
    """Mean, 99th percentile, maximum of |old - behaviour| with the trainer's own choice of experts."""
    replayed: tuple[float, float, float]


@benchmark(responses=1)
def replay(responses: int = 16) -> None:
    """What replaying the engine's experts does to log-probs (docs/evidence/mixture-of-experts.md).

    A mixture of 8 layers with 32 experts each, of which a token takes 4 (random weights); a real engine on a
    CPU samples 8 x ``responses`` responses in float32 and in bfloat16, and the trainer scores them in the
    same precision, with its own choice of experts and with the engine's. |old - behaviour| in nats.
    """
    columns = ("engine and trainer", "tokens", "choices that differ|.2%", "tokens with one|.1%", "experts")
    table = Table(*columns, "mean|.1e", "p99|.1e", "max|.1e")
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float32", "bfloat16"):
            row = measure_replay(Path(scratch) / dtype, dtype, responses)
            table.row(dtype, row.tokens, row.changed, row.changed_tokens, "the trainer's", *row.own)
            table.row(dtype, row.tokens, None, None, "replayed", *row.replayed)


def measure_replay(folder: Path, dtype: str, responses: int = 16) -> Row:
    """Sample and score in one precision."""
    rng = np.random.default_rng(0)
    weights = {
        name: ((len(dims) == 1) + 0.1 * rng.normal(size=dims)).astype(np.float32)
        for name, dims in mapping_for(EXPERTS).hf_tensors().items()
    }
    engine = {"max_sequences": 64, "kv_cache_gib": 0.25, "cpu_threads": 1}
    engine |= {"arguments": ["--skip-tokenizer-init"]}
    settings = Settings.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(write_checkpoint(folder / "model", EXPERTS, weights))},
            "data": {"path": "unused", "max_prompt_tokens": 64},
            "precision": {"dtype": dtype},
            "optimizer": {"distributed": False},
            "training": {"router_replay": "rollout"},
            "rollout": {"prompts_per_step": 16, "max_response_tokens": 128},
            "engine": engine,
        }
    )
    return on_rank(_score, settings, _sample(settings, folder, responses))


def _sample(settings: Settings, folder: Path, responses: int) -> list[Trajectory]:
    """Responses of a real engine with the checkpoint's weights, with routes."""
    # Not at the top: ``precisions`` needs no engine's packages.
    from rpg_megatron.engine.client import EngineClient
    from tests.support.engine import running_engines

    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, EXPERTS.vocab_size, n).astype(np.int32) for n in PROMPTS]

    async def ask(socket: Path, token: str) -> list[Any]:
        client = EngineClient(0, socket, token, timeout=1800, experts=EXPERTS.experts)
        options = {"max_tokens": settings.rollout.max_response_tokens, "temperature": 1.0}
        requests = [client.generate(p, n=responses, seed=1000 * i, **options) for i, p in enumerate(prompts)]
        try:
            return await asyncio.gather(*requests)
        finally:
            await client.close()

    with running_engines(folder, [settings], weights="checkpoint") as (engine,):
        groups = asyncio.run(ask(engine.process.socket, engine.token))
    trajectories = []
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            t = trajectory_of(np.concatenate([prompt, sample.tokens]), len(prompt), len(trajectories))
            t.behaviour, t.routes = sample.logprobs, sample.routes
            trajectories.append(t)
    return trajectories


def _score(device: torch.device, mesh: Mesh, settings: Settings, trajectories: list[Trajectory]) -> Row:
    """On a trainer rank."""
    from rpg_megatron.policy.router_replay import change_metrics, count_changes
    from tests.support.rank_policy import checkpoint_policy

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
    changes = change_metrics(count_changes(packs, mesh), policy.replayed)
    own = np.concatenate(list(gaps([pack.without_routes() for pack in packs])))
    shares = changes["routes/changed"], changes["routes/changed_tokens"]
    spread = [(gap.mean(), np.quantile(gap, 0.99), gap.max()) for gap in (own, replayed)]
    return Row(len(own), *shares, *spread)


if __name__ == "__main__":
    main(__doc__, precisions, replay)

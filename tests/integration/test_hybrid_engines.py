"""Engines of models with gated delta nets, against transformers on the whole sequences.

Why: such an engine carries a state from token to token, in a cache whose slots other sequences had before. If
a state is stale, lost between steps, or another sequence's, responses are plausible, but not their log-probs.
On a CPU the product computes these layers in float32 itself (``bridge/vllm/cpu_delta_net.py``); in bfloat16
vLLM does. Not covered: the trainer (test_bridge_matrix), GPUs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rpg_megatron.bridge.controller import sync_engine
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.engine.client import Sample
from rpg_megatron.engine.command import context_length
from rpg_megatron.engine.hybrid_cache import hybrid_cache
from rpg_megatron.engine.metrics import PREEMPTIONS, ROUTE, read_metrics
from rpg_megatron.launcher.layer_checks import check_hybrid_cache
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_rig import (
    ask,
    bridge_engines,
    gaps,
    hf_logprobs,
    make_model,
    prompt_logprobs,
    running_rig,
    settings_for,
    write_released,
)
from tests.support.bridge_trainers import published, state_dict
from tests.support.engine import Engine, running_engines, sampled_tokens
from tests.support.megatron_shards import stage_values

LENGTHS = (1, 2, 3, 4, 17, 63, 64, 65, 130, 17, 64)
"""Of prompts: shorter than the convolution, about a chunk, more than one, and twice the same."""
TOLERANCE = 1e-4


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(101) for _ in range(n)] for n in LENGTHS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("qwen3.5", [1]),
        pytest.param("qwen3.5", [2], marks=pytest.mark.long),
        *(pytest.param(name, [1, 2], marks=pytest.mark.long) for name in ("qwen3.5-moe", "qwen3-next")),
    ],
)
def test_float32_after_each_sync(tmp_path: Path, name: str, workers: list[int]) -> None:
    """Engines with one and two workers; long and short requests, so that prompts join running batches."""
    with bridge_engines(tmp_path, name, workers) as engines, running_rig(tmp_path, engines[0]) as rig:
        for version in range(1, 4):
            transport = ("shared_memory", "process_group")[version % 2]
            manifest = rig.publish(version, version, transport)
            weights = state_dict(rig.model, version)
            for engine in engines:
                assert engine.sync(version, manifest).mode == "slices"
                reference = hf_logprobs(rig.model, weights)
                prompt_gap = (prompt_logprobs(engine, "policy") - reference).abs().max()
                samples = asyncio.run(ask(engine, prompts(), 5, 70, 30))
                decoded = gaps(rig.model, weights, prompts(), samples).max()
                print(f"\nTP{engine.tensor}, {transport}: prompt {prompt_gap:.1e}, decoding {decoded:.1e}")
                assert max(prompt_gap, decoded) <= TOLERANCE
        assert rig.error(2) > 0.1, "the weights differ"


def differing_routes(
    model: Path, prompts: Sequence[Sequence[int]], samples: Sequence[Sample]
) -> tuple[int, int]:
    """Choices, one a token and layer, that transformers' routers make otherwise; and their number."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for module in reference.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, inputs, out: chosen.append(out[2]))
    differing = []
    for prompt, sample in zip(prompts, samples, strict=True):
        chosen.clear()
        with torch.no_grad():
            reference(torch.tensor([[*prompt, *sample.tokens.tolist()][:-1]]))
        expected = torch.stack(chosen, 1).sort(-1).values.numpy()
        assert sample.routes.shape == expected.shape
        differing.append((np.sort(sample.routes, -1) != expected).any(-1).flatten())
    flat = np.concatenate(differing)
    return int(flat.sum()), len(flat)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_routes_in_the_smallest_cache(tmp_path: Path) -> None:
    """Of two workers, which cache no prefixes; a sequence that lost its room is computed anew."""
    make_model("qwen3-next", tmp_path / "model")
    raw = settings_for(tmp_path / "model", 2) | {"training": {"router_replay": "rollout"}}
    settings, shape = Settings.model_validate(raw), read_model_shape(tmp_path / "model")
    assert shape.experts is not None
    cache = hybrid_cache(settings, shape)
    assert cache is not None
    nbytes = cache.sequence(context_length(settings, shape)) + cache.block_bytes
    settings = settings.changed(engine={"kv_cache_gib": nbytes / 1024**3})
    with running_engines(tmp_path, [settings], weights="checkpoint") as (engine,):
        for texts, *tokens in (([prompt[:120] for prompt in prompts()[-3:]], 300), (prompts(), 5, 70, 30)):
            samples = asyncio.run(ask(engine, texts, *tokens, experts=shape.experts))
            differ, count = differing_routes(tmp_path / "model", texts, samples)
            print(f"\nother choices: {differ} of {count}")
            assert differ <= count / 1000, "rounding may decide between two experts"
        assert read_metrics(engine.call("GET", ROUTE)[1])[PREEMPTIONS] > 0


@pytest.mark.timeout(600)
def test_a_released_model_in_the_smallest_cache(tmp_path: Path) -> None:
    """Sequences wait for room, and lose it again; then their states are computed anew."""
    make_model("qwen3.5", tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    write_released("qwen3.5", tmp_path / "model", weights)
    raw = settings_for(tmp_path / "model", 1)
    settings = Settings.model_validate(raw)
    shape = read_model_shape(tmp_path / "model")
    cache = hybrid_cache(settings, shape)
    assert cache is not None

    def with_cache(nbytes: int) -> Settings:
        return Settings.model_validate(raw | {"engine": raw["engine"] | {"kv_cache_gib": nbytes / 1024**3}})

    needed = cache.sequence(context_length(settings, shape)) + cache.block_bytes
    with pytest.raises(UserError, match=r"engine\.kv_cache_gib .* one sequence of 632 tokens takes 0\.0006"):
        check_hybrid_cache(with_cache(needed - 1), shape)
    check_hybrid_cache(with_cache(needed), shape)
    with running_engines(tmp_path, [with_cache(needed)], weights="checkpoint") as (engine,):
        long = [prompt[:120] for prompt in prompts()[-3:]]
        samples = asyncio.run(ask(engine, long, 300))
        first = gaps(tmp_path / "model", weights, long, samples).max()
        metrics = read_metrics(engine.call("GET", ROUTE)[1])
        assert metrics[PREEMPTIONS] > 0
        samples = asyncio.run(ask(engine, prompts(), 5, 70, 30))
        assert max(first, gaps(tmp_path / "model", weights, prompts(), samples).max()) <= TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_released_mixture(tmp_path: Path) -> None:
    """Files have all experts of a layer in two tensors; vLLM loads these, and a sync one tensor an expert."""
    base, model = tmp_path / "base", tmp_path / "model"
    make_model("qwen3.5-moe", base)
    write_released("qwen3.5-moe", model, load_file(base / "model.safetensors"))
    assert {len(w.shape) for n, w in load_file(model / "model.safetensors").items() if ".experts." in n} == {
        3
    }
    settings = Settings.model_validate(settings_for(model, 1))
    layout = mapping_for(read_model_shape(model))
    with running_engines(tmp_path, [settings], weights="checkpoint") as (engine,):
        samples = asyncio.run(ask(engine, prompts(), 5, 70, 30))
        loaded = gaps(base, load_file(base / "model.safetensors"), prompts(), samples).max()
        weights = state_dict(base, 1)
        assert gaps(base, weights, prompts(), samples).max() > 0.1, "the weights differ"
        with published(engine.bridge, model, stage_values(layout, ONE_RANK, 1, weights), 1):
            assert engine.sync(1).mode == "slices"
        samples = asyncio.run(ask(engine, prompts(), 5, 70, 30))
        synced = gaps(base, weights, prompts(), samples).max()
        print(f"\nloaded {loaded:.1e}, synced {synced:.1e}")
        assert max(loaded, synced) <= TOLERANCE


async def interrupted(engine: Engine, begun: list[list[int]], manifest: Manifest) -> list[Sample]:
    """Responses that a sync interrupts, when each has some tokens."""
    before, _ = await sampled_tokens(engine)

    async def sync() -> None:
        while (await sampled_tokens(engine))[0] < before + 10 * len(begun):
            await asyncio.sleep(0.02)
        await sync_engine(
            engine.post, manifest, version=1, engine_tensor=engine.tensor, timeout=60, interrupt=True
        )

    samples, _ = await asyncio.gather(ask(engine, begun, 500, interruptible=True), sync())
    return samples


@pytest.mark.timeout(600)
def test_interrupted_responses_continue(tmp_path: Path) -> None:
    """A partial response is continued as a prompt, under new weights, in a slot that another one had."""
    with bridge_engines(tmp_path, "qwen3.5", [1]) as (engine,), running_rig(tmp_path, engine) as rig:
        model = rig.model
        engine.sync(7, rig.publish(7, 7))
        manifest = rig.publish(8, 1)
        begun = prompts()[3:9]
        samples = asyncio.run(interrupted(engine, begun, manifest))
        assert all(sample.finish == "abort" and 0 < len(sample.tokens) < 500 for sample in samples)
        before = gaps(model, state_dict(model, 7), begun, samples).max()
        longer = [[*p, *s.tokens.tolist()] for p, s in zip(begun, samples, strict=True)]
        after = gaps(model, state_dict(model, 8), longer, asyncio.run(ask(engine, longer, 40))).max()
        print(f"\nbefore {before:.1e}, after {after:.1e}")
        assert max(before, after) <= TOLERANCE


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels for bfloat16 need AVX-512 with bfloat16"
)
@pytest.mark.parametrize(
    "name",
    ["qwen3.5, heads of 128", pytest.param("qwen3.5-moe, heads of 128", marks=pytest.mark.long)],
)
def test_bfloat16_after_each_sync(tmp_path: Path, name: str) -> None:
    """The released form by vLLM's own kernels and loader; syncs bring it no further from transformers."""
    base, model = tmp_path / "base", tmp_path / "model"
    make_model(name, base, torch.bfloat16)

    def weights_of(seed: int) -> dict[str, torch.Tensor]:
        """All of the same size, since rounding grows with it."""
        return {
            name: weight.float() if name.endswith("A_log") else weight.bfloat16()
            for name, weight in state_dict(base, seed).items()
        }

    write_released(name, model, weights_of(0), torch.bfloat16)
    settings = Settings.model_validate(settings_for(model, 1) | {"precision": {"dtype": "bfloat16"}})
    layout = mapping_for(read_model_shape(model))

    def measure(seed: int) -> torch.Tensor:
        """Mean and largest gap. Rounding is amplified behind the shortest prompts."""
        samples = asyncio.run(ask(engine, prompts(), 5, 70, 60))
        found = gaps(model, weights_of(seed), prompts()[4:], samples[4:])
        print(f"\nweights {seed}: mean {found.mean():.4f}, max {found.max():.4f} of {len(found)}")
        return torch.stack([found.mean(), found.max()])

    def alone() -> list[Sample]:
        """One request after the other: who shares a batch, and so rounding, would be a matter of time."""
        return [asyncio.run(ask(engine, [prompt], 5))[0] for prompt in prompts()]

    with running_engines(tmp_path, [settings], weights="checkpoint") as (engine,):
        loaded, samples = measure(0), alone()
        for version, seed in enumerate((1, 2, 3, 4, 0), start=1):
            params = stage_values(layout, ONE_RANK, 1, weights_of(seed))
            with published(engine.bridge, model, params, version, torch.bfloat16):
                engine.sync(version)
            assert (measure(seed) <= 1.5 * loaded).all()
        same = [np.array_equal(x.logprobs, y.logprobs) for x, y in zip(samples, alone(), strict=True)]
        assert all(same), "the loader and the bridge bring the same bits"

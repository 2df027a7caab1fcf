"""One trainer rank of the bridge tests: Megatron weights, changed at random, brought into real engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.bridge.controller import SyncReport, sync_engine
from rpg_megatron.bridge.publisher import published
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient, Sample
from rpg_megatron.models.lora import AdaptedMapping, with_adapters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.expert_load import layers_with_experts
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training import weight_sync
from rpg_megatron.training.weight_sync import open_publisher
from tests.support.one_switch import (
    MARGINS,
    Comparison,
    compare_tokens,
    engines_held,
    hold_at,
    near_ties_flipped,
)
from tests.support.rank_policy import checkpoint_policy

PROMPTS = [[3 + (7 * i + k) % 90 for i in range(9 + 5 * k)] for k in range(3)]


class Engines:
    """Rank 0's connection to the engines: coroutines run in a thread, beside the ranks' work."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tensor, self.bridge = case["engines"], Path(case["bridge"])
        token = case["token"]
        self.clients = [EngineClient(i, Path(s), token, timeout=900) for i, s in enumerate(case["sockets"])]

    def start(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def sync(self, manifest: Any, version: int) -> list[SyncReport]:
        return await asyncio.gather(
            *[
                sync_engine(c.post, manifest, version=version, engine_tensor=t, timeout=900)
                for c, t in zip(self.clients, self.tensor, strict=True)
            ]
        )

    def hold_at(self, tokens: int) -> None:
        """Let the engines stop at this number of tokens of the next ``generate``; see ``one_switch``."""
        hold_at(self.bridge, 2 * len(PROMPTS), tokens)

    async def wait_held(self, under_way: Any) -> None:
        """Until all engines have stopped for ``hold_at``."""
        while engines_held(self.bridge) < len(self.clients):
            assert not under_way.done(), "the responses ended"
            await asyncio.sleep(0.005)

    async def ranks_read(self) -> list[int]:
        """The trainer ranks that the engines read weights from in the last sync."""
        answers = [await c.post("/collective_rpc", {"method": "rpg_ack"}) for c in self.clients]
        acks = [ack for _, text in answers for ack in json.loads(text)["results"]]
        return sorted({rank for ack in acks for ranks in ack["ranks_read"].values() for rank in ranks})

    async def generate(self, seed: int, tokens: int) -> list[list[list[Sample]]]:
        """[engine][prompt] -> two responses each."""
        return await asyncio.gather(
            *[
                asyncio.gather(
                    *[
                        c.generate(p, n=2, max_tokens=tokens, temperature=1.0, seed=seed + 10 * i)
                        for i, p in enumerate(PROMPTS)
                    ]
                )
                for c in self.clients
            ]
        )


def perturb(policy: Policy, seed: int, tied: bool, noise_scale: float) -> None:
    """Add noise to every trained weight: the same to copies of one, whichever ranks hold them."""
    for name, p in policy.trained_parameters():
        shared = tied and name in ("embedding.word_embeddings.weight", "output_layer.weight")
        cut: Any = policy.mesh.tensor_rank if getattr(p, "tensor_model_parallel", False) else 0
        if ".experts." in name:
            cut = policy.mesh.experts.rank, policy.mesh.experts.tensor_rank
        key = f"{'vocabulary' if shared else name}/{cut}/{seed}".encode()
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(key)))
        with torch.no_grad():
            p.add_(noise_scale * noise)


def score(policy: Policy, samples: list[list[list[Sample]]]) -> list[np.ndarray]:
    """The trainer's log-probs of every response, in order; every rank calls it."""
    trajectories = [
        Trajectory(
            prompt_id=0,
            sample=0,
            group=0,
            prompt=np.array(prompt, np.int32),
            response=sample.tokens,
            behaviour=sample.logprobs,
            versions=np.zeros(len(sample.tokens), np.int32),
            finish=sample.finish,
            text="",
            reward=0.0,
            correct=False,
        )
        for engine in samples
        for prompt, group in zip(PROMPTS, engine, strict=True)
        for sample in group
    ]
    packs = [policy.pack(trajectories[i : i + 4]) for i in range(0, len(trajectories), 4)]
    scored = zip(packs, policy.logprobs(packs), strict=True)
    return [part.numpy() for pack, values in scored for _, part in pack.split(values[0])]


def from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def behaviours(samples: list[list[list[Sample]]]) -> list[np.ndarray]:
    return [s.logprobs for engine in samples for group in engine for s in group]


def compare(
    policy: Policy,
    samples: list[list[list[Sample]]],
    margins: Sequence[float],
    old: HeldAnchor | None = None,
    switch: int = 0,
) -> list[Comparison]:
    """Each response: tokens up to ``switch`` with the old weights, all others with the policy's.

    margins: see ``near_ties_flipped``. Every rank calls it; the result is rank 0's.
    """
    engine = behaviours(samples)
    olds = [] if old is not None else [engine]
    news = []
    for margin in margins:
        with near_ties_flipped(layers_with_experts(policy.chunks), margin):
            news.append(score(policy, samples))
            if old is not None:
                with old.swapped_in():
                    olds.append(score(policy, samples))
        comparisons: list[Comparison] = from_rank_0(
            [
                compare_tokens(values, [was[i] for was in olds], [now[i] for now in news], switch)
                for i, values in enumerate(engine)
            ]
        )
        if not any(comparison.odd for comparison in comparisons):
            break
    return comparisons


def measure(case: dict[str, Any], parallel: dict[str, int], device: torch.device, engines: Any) -> dict:
    settings = Settings.model_validate({**case["settings"], "parallel": parallel})
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)
    layout = mapping_for(shape)
    policy = checkpoint_policy(settings, mesh, device)
    placement = mesh.coordinates(settings.model.vocab_multiple)
    params = policy.served.tensors
    mapping = with_adapters(layout, settings.lora)
    adapters = mapping.adapters.hf_tensors().keys() if isinstance(mapping, AdaptedMapping) else None
    weight_sync.BUCKET_BYTES = 1 << 20  # several messages a sync
    publishers = {
        kind: open_publisher(
            settings.bridge.model_copy(update={"transport": kind}),
            Path(case["bridge"]),
            placement,
            params,
            mapping,
            torch.float32,
            adopt=True,
        )
        for kind in ("shared_memory", "process_group")
    }
    out: dict[str, Any] = {"mismatch": [], "switched": [], "bytes": [], "checked": []}
    version = case["version"]
    margins = MARGINS if shape.experts else MARGINS[:1]

    def bring(kind: str) -> None:
        nonlocal version
        version += 1
        with published(publishers[kind], version, adapters if out["bytes"] else None) as manifest:
            reports = engines.start(engines.sync(manifest, version)).result() if manifest else []
            dist.barrier()
        if manifest and kind == "process_group":
            out["ranks_read"] = engines.start(engines.ranks_read()).result()
        out["bytes"].append([sum(r.bytes_per_worker) for r in reports])
        out["checked"].append([sum(r.bytes_checked) for r in reports])

    for change in range(case["perturbations"]):
        for kind in publishers:
            perturb(policy, 2 * change + (kind == "process_group"), shape.tied_embeddings, case["noise"])
            bring(kind)
            responses = engines.start(engines.generate(change, 12)).result() if engines else None
            samples = from_rank_0(responses)
            out["mismatch"].append(max(c.gap for c in compare(policy, samples, margins)))
    for number, (kind, moments) in enumerate((k, m) for k in publishers for m in case["moments"]):
        if engines:
            engines.hold_at(moments[0])
        under_way = engines.start(engines.generate(99 + number, case["long_response"])) if engines else None
        old = HeldAnchor([p for _, p in policy.trained_parameters()], settings.anchor)
        # There and back, since rounding grows with the weights.
        perturb(policy, 1000 + number // 2, shape.tied_embeddings, case["noise"] * (-1) ** number)
        for sync, next_moment in enumerate([*moments[1:], 0]):
            if engines:
                engines.start(engines.wait_held(under_way)).result()
                engines.hold_at(next_moment)
            dist.barrier()
            with old.swapped_in() if sync % 2 else nullcontext():
                bring(kind)
        samples = from_rank_0(under_way.result() if engines else None)
        out["switched"].append([asdict(c) for c in compare(policy, samples, margins, old, moments[0])])
    for publisher in publishers.values():
        publisher.close()
    mpu.destroy_model_parallel()
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    case = json.loads((folder / "case.json").read_text())
    engines = Engines(case) if dist.get_rank() == 0 else None
    results = {}
    for name, parallel in case["layouts"].items():
        results[name] = measure(case, parallel, device, engines)
        case["version"] += 1000
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of links that are gone must not hold the process up


if __name__ == "__main__":
    main()

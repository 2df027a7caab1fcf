"""The trainer rank of test_lora_precision: adapters of growing size, in bfloat16, for three engines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rpg_megatron.bridge.publisher import Publisher, published
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.models.lora import AdaptedMapping, split_parameters, with_adapters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.policy.precision import ExportedWeights
from rpg_megatron.training.weight_sync import open_publisher
from tests.integration import sync_worker
from tests.integration.sync_worker import Engines, behaviours, score
from tests.support.rank_policy import checkpoint_policy

sync_worker.PROMPTS = [[3 + (7 * i + 13 * k) % 90 for i in range(16)] for k in range(12)]
TOKENS = 48


@torch.no_grad()
def set_size(policy: Policy, size: float) -> float:
    """Give every adapter a random B of |scale B A| / |W| = size; returns the largest measured one."""
    assert policy.adapters is not None
    weights = dict(policy.named_parameters())
    sizes = []
    for number, (name, hook) in enumerate(policy.adapters._hooks.items()):
        weight = weights[name].float()
        generator = torch.Generator().manual_seed(number)
        for adapter in hook.adapters:
            adapter.B.copy_(torch.randn(adapter.B.shape, generator=generator))
        delta = hook.merge(torch.zeros_like(weight), torch.float32)
        for adapter in hook.adapters:
            adapter.B.mul_(size * weight.norm() / delta.norm())
        sizes.append(float(hook.merge(torch.zeros_like(weight), torch.float32).norm() / weight.norm()))
    return max(sizes)


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    case = json.loads((folder / "case.json").read_text())
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    layout = mapping_for(read_model_shape(settings.model.path))
    mapping = with_adapters(layout, settings.lora)
    assert isinstance(mapping, AdaptedMapping)
    policy = checkpoint_policy(settings, mesh, device)
    model, _ = split_parameters(dict(policy.named_parameters()))
    merged = ExportedWeights(model.items(), policy.adapters)
    sources: dict[str, tuple[Any, Any]] = {
        "shared_memory": (mapping, policy.served.tensors),
        "process_group": (layout, merged.tensors),
    }
    publishers: dict[str, Publisher] = {
        kind: open_publisher(
            settings.bridge.model_copy(update={"transport": kind, "timeout": 60.0}),
            Path(case["bridge"]),
            mesh.coordinates(settings.model.vocab_multiple),
            tensors,
            layout_of,
            torch.bfloat16,
            adopt=False,
        )
        for kind, (layout_of, tensors) in sources.items()
    }
    parts = {
        "shared_memory": Engines(case["with adapters"]),
        "process_group": Engines(case["merged"]),
    }
    rows = []
    for version, size in enumerate([0.0, *case["sizes"]]):
        actual = set_size(policy, size) if size else 0.0
        merged.refresh()
        row: dict[str, Any] = {"size": actual, "mean": []}
        for kind, engines in parts.items():
            only = mapping.adapters.hf_tensors().keys() if version and kind == "shared_memory" else None
            with published(publishers[kind], version, only) as manifest:
                engines.start(engines.sync(manifest, version)).result()
            samples = engines.start(engines.generate(1, TOKENS)).result()
            gaps = [np.abs(a - b) for a, b in zip(score(policy, samples), behaviours(samples), strict=True)]
            each = np.array_split(np.arange(len(gaps)), len(engines.clients))
            row["mean"] += [float(np.concatenate([gaps[i] for i in part]).mean()) for part in each]
        rows.append(row)
    for publisher in publishers.values():
        publisher.close()
    (folder / "result.json").write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""One rank of test_fp8_layouts: score and update a fixed batch with emulated FP8 in several layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from benchmarks.policies import batch_of
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.config import Settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.fp8_emulation import EmulatedProduct
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.rank_policy import checkpoint_policy, cut_unevenly, save_weights


def watch(layer: torch.nn.Module, operands_by_name: dict[str, torch.Tensor], name: str) -> None:
    """Record the operands of a layer's products; later ones replace earlier ones."""
    product = getattr(layer, "fp8", None)
    if product is None:
        return
    operands = product.for_output

    def watched(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = operands(*args)
        operands_by_name.update({f"{name} x": x, f"{name} w": w})
        return x, w

    product.for_output = watched


def measure(case: dict[str, Any], settings: Settings, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    policy = checkpoint_policy(settings, mesh, device)
    batch = batch_of([40, 90, 33, 64, 21], 256)
    packs = [policy.pack(micro) for micro in cut_unevenly(batch, case.get("microbatches", 1), mesh)]
    first = policy.chunks[0].decoder.layers[0]
    linear, attention = settings.model.path.name == "hybrid", first.self_attention
    inputs, output = ("in_proj", "out_proj") if linear else ("linear_qkv", "linear_proj")
    values: dict[str, Any] = {"raw w": getattr(attention, inputs).weight.detach().clone()}
    watch(getattr(attention, inputs), values, "qkv")
    watch(getattr(attention, output), values, "proj")

    def logprobs() -> torch.Tensor:
        parts = [p.split(v[0]) for p, v in zip(packs, policy.logprobs(packs), strict=True)]
        return torch.cat([part for pack in parts for _, part in pack])

    if case.get("load"):
        load_weights(Path(case["load"]), policy.chunks, 256)
    values["logp"] = logprobs()
    first_pass = {name: value.clone() for name, value in values.items()}
    values["logp again"] = logprobs()
    for _ in range(case.get("updates", 1)):
        with policy.updating():
            policy.update(packs, build_loss(settings), build_aggregator(settings), lr=0.0)
    products = {n: m for n, m in policy.chunks[0].named_modules() if isinstance(m, EmulatedProduct)}
    result = {
        **values,
        **first_pass,
        "gradients": {n: p.main_grad.clone() for n, p in policy.named_parameters()},
        "products": sorted(products),
        "scales": {n: m.scale for n, m in products.items() if hasattr(m, "scale")},
        "after": logprobs(),
    }
    if case.get("save"):
        if mesh.rank == 0:
            Path(case["save"]).mkdir()
        dist.barrier()
        save_weights(Path(case["save"]), policy.chunks)
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    cases = json.loads((folder / "cases.json").read_text())
    cut, mesh = None, None
    for name, case in cases.items():
        settings = Settings.model_validate(case["settings"])
        if mesh is None or settings.parallel != cut:
            if mesh is not None:
                mpu.destroy_model_parallel()
            cut, mesh = settings.parallel, start_mesh(settings.parallel)
        torch.save(measure(case, settings, mesh, device), folder / f"{name}_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (folder / "result.json").write_text("{}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

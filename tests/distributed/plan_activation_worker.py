"""One rank of test_plan_memory: the bytes that autograd saves in an update, each piece of memory once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.distributed.plan_memory_worker import trajectories


def saved_bytes(case: dict, device: torch.device) -> int:
    """Run one update on one micro-batch; the sum over the storages that are saved, parameters left out."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)
    policy = Policy(settings, shape, mesh, device, lambda policy: None)
    pack = policy.pack(trajectories(case["lengths"], shape.vocab_size))
    weights = {p.untyped_storage().data_ptr() for _, p in policy.named_parameters()}
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        # What the loss saves is no more than a few numbers a token. Backward saves what it recomputes.
        if place not in weights and torch._C._current_graph_task_id() == -1:
            storages.setdefault(place, tensor)  # kept alive, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.updating():
        policy.update([pack], build_loss(settings), build_aggregator(settings), lr=1e-6)
    mpu.destroy_model_parallel()
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    cases = json.loads((folder / "case.json").read_text())
    saved = {name: saved_bytes(case, device) for name, case in cases.items()}
    all_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, saved)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(all_ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

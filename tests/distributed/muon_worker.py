"""One rank of test_muon: the first update of each matrix beside the one that its gradient asks for."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from rpg_megatron.config import Settings
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.muon import SIZE, orthogonalise
from tests.support.rank_policy import checkpoint_policy
from tests.support.ranks import measure_cases

LR = 0.01


def whole(shard: Tensor, parameter: Tensor) -> Tensor:
    """A matrix from its shards on the tensor ranks that hold it; experts have ranks of their own."""
    dim = getattr(parameter, "partition_dim", -1)
    if dim < 0:
        return shard
    expert = not getattr(parameter, "allreduce", True)
    group = mpu.get_expert_tensor_parallel_group() if expert else mpu.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    torch.distributed.all_gather(shards, shard.contiguous(), group)
    return torch.cat(shards, dim)


def parts(name: str, matrix: Tensor, heads: tuple[int, int]) -> Iterator[Tensor]:
    """The matrices that Muon updates each by itself: query, key and value of all groups of heads."""
    if "linear_qkv" not in name:
        yield matrix
        return
    queries, size = heads
    groups = matrix.view(-1, (queries + 2) * size, matrix.shape[1])
    for part in groups.split([queries * size, size, size], dim=1):
        yield part.reshape(-1, matrix.shape[1])


def measure(case: dict, folder: Path, device: torch.device) -> dict[str, float]:
    """Name -> size of the difference between the update and the one expected, as a share of the latter."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    policy = checkpoint_policy(settings, mesh, device)
    matrices = {
        name: p
        for name, p in policy.named_parameters()
        if p.dim() == 2 and not name.endswith(("word_embeddings.weight", "output_layer.weight"))
    }
    main = {name: getattr(p, "main_param", p) for name, p in matrices.items()}
    before = {name: p.detach().clone() for name, p in main.items()}
    packs = [policy.pack(pickle.loads((folder / "batch.pkl").read_bytes()))]
    with policy.updating():
        policy.update(packs, build_loss(settings), build_aggregator(settings), lr=LR)
    state = {
        p: values
        for part in policy._optimizer.chained_optimizers
        for p, values in part.optimizer.state.items()
    }
    off = {}
    for name, p in matrices.items():
        moved = whole((before[name] - main[name].detach()) / LR, p)
        # After one update from zero the momentum is the gradient, but for its size, which does not matter.
        gradient = whole(state[main[name]]["momentum_buffer"], p)
        pairs = zip(*(parts(name, m, case["heads"]) for m in (moved, gradient)), strict=True)
        for i, (update, direction) in enumerate(pairs):
            expected = SIZE * max(direction.shape) ** 0.5 * orthogonalise(direction)
            off[f"{name} {i}"] = float((update - expected).norm() / expected.norm())
    return off


if __name__ == "__main__":
    measure_cases(measure)

"""One rank of test_overlap: updates with and without overlapped communication."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings
from rpg_megatron.policy import optimizer
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.rank_policy import checkpoint_policy, cut_unevenly

BUCKET = 1000
"""Minimum parameters of a bucket: about one tensor in each; by default all would share one."""


def run(case: dict, folder: Path, device: torch.device) -> dict:
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    policy = checkpoint_policy(settings, mesh, device)
    batch = pickle.loads((folder / "batch.pkl").read_bytes())
    # Megatron counts in the first update how often a gradient is added to; later ones have other numbers.
    cuts = [cut_unevenly(batch, count, mesh) for count in (case["microbatches"], case["microbatches"] - 4)]
    minibatches = [[policy.pack(micro) for micro in cut] for cut in cuts]

    def replicas_agree() -> bool:
        """Whether the ranks that should hold the same weights do."""
        digests = [hashlib.md5(p.detach().numpy().tobytes()).digest() for _, p in policy.named_parameters()]
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        all_digests: list = [None] * group.size()
        dist.all_gather_object(all_digests, digests, group=group)
        agree = torch.tensor([int(all(rank_digests == all_digests[0] for rank_digests in all_digests))])
        dist.all_reduce(agree, op=dist.ReduceOp.MIN)
        return bool(agree)

    reports, within = [], []
    for _ in range(2):
        with policy.updating():
            for packs in minibatches:
                update = policy.update(packs, build_loss(settings), build_aggregator(settings), lr=1e-2)
                reports.append([update.loss, update.grad_norm])
                within.append(replicas_agree())
        assert replicas_agree(), "replicas differ outside of an update"
    scored = [values.tolist() for values in policy.logprobs([policy.pack([t]) for t in batch])]
    weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
    buckets = sum(len(model.bucket_groups) for model in policy._models)
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, weights)
    mpu.destroy_model_parallel()
    return {"reports": reports, "within": within, "scored": scored, "weights": everyone, "buckets": buckets}


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    optimizer.DistributedDataParallelConfig = functools.partial(  # type: ignore[misc,assignment]
        optimizer.DistributedDataParallelConfig, bucket_size=BUCKET
    )
    cases = json.loads((folder / "cases.json").read_text())
    results = {name: run(case, folder, device) for name, case in cases.items()}
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
        (folder / "result.json").write_text("{}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_resume_layouts: update a fixed batch, save, load, and update again, in several layouts."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.checkpoints.run_folder import CONFIG
from rpg_megatron.config import Settings
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.training.checkpoint_saver import Saver, load_model
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.rank_policy import checkpoint_policy, cut_unevenly
from tests.support.ranks import measure_cases


def run(case: dict, folder: Path, device: torch.device) -> list[dict]:
    """Load or make a policy, update it, save it where ``case`` says; what the updates reported."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    policy = checkpoint_policy(settings, mesh, device)
    anchor = HeldAnchor([p for _, p in policy.trained_parameters()], settings.anchor)
    batch = pickle.loads((folder / "batch.pkl").read_bytes())
    packs = [policy.pack(micro) for micro in cut_unevenly(batch, 5, mesh)]
    if case["load"]:
        if not settings.optimizer.distributed:  # whatever a parameter holds, it must be overwritten
            with torch.no_grad():
                for _, p in policy.named_parameters():
                    p.fill_(7.0)
        load_model(Path(case["load"]), policy, anchor)
    reports, savers = [], []
    for place in case["then"]:
        with policy.updating():
            update = policy.update(packs, build_loss(settings), build_aggregator(settings), lr=1e-2)
        reports.append({"loss": update.loss, "grad_norm": update.grad_norm})
        if place:
            if mesh.rank == 0:
                Path(place).mkdir(parents=True)
                (Path(place) / CONFIG).write_text("")
            saver = Saver(Path(place), policy, anchor, settings.checkpoint)
            saver.start(1, dict)
            savers.append(saver)  # the next updates do not wait for it
    for saver in savers:
        saver.wait()
        assert [outcome.problem for outcome in saver.pop_results()] == [None]
    dist.barrier()  # others read what rank 0 has named
    mpu.destroy_model_parallel()
    return reports


if __name__ == "__main__":
    measure_cases(run)

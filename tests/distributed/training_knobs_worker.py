"""One rank of test_training_knobs: a KL in the reward, and several passes over a batch."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rpg_megatron.config import Settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare


def make(case: dict, mesh: Mesh, device: torch.device, epochs: int) -> Trainer:
    sections = case["settings"] | {"training": case["settings"]["training"] | {"ppo_epochs": epochs}}
    return Trainer(Settings.model_validate(sections), mesh, device)


def scored(trainer: Trainer, folder: Path) -> Batch:
    batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
    trainer.scorer.compute_log_probs(batch)
    return batch


def weights(trainer: Trainer) -> float:
    """A number that almost surely changes with any bit of a weight."""
    return sum(p.detach().double().sin().sum().item() for _, p in trainer.policy.named_parameters())


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    case = json.loads((folder / "case.json").read_text())
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)

    trainer, calls = make(case, mesh, device, 2), []
    batch = scored(trainer, folder)
    before = [t.old.copy() for t in batch.mine]
    trainer.update(1, batch, lambda done, total: calls.append((done, total)))
    assert all(np.array_equal(t.old, old) for t, old in zip(batch.mine, before, strict=True))
    epochs = weights(trainer)
    second = scored(trainer, folder)  # the policy has left the anchor
    rows = [
        (t.group, t.sample, float((t.old.astype(np.float64) - t.anchor)[t.mask].sum()), t.advantage)
        for t in iter_trajectories(second.minibatches)
    ]
    ranks = gather_objects(rows)

    once, twice = make(case, mesh, device, 1), make(case, mesh, device, 1)
    first = scored(twice, folder)
    first.minibatches = first.minibatches * 2
    for each, share in ((once, scored(once, folder)), (twice, first)):
        each.update(1, share, lambda done, total: None)
    if mesh.rank == 0:
        result = {
            "ranks": ranks,
            "row": second.metrics,
            "calls": calls,
            "epochs": epochs,
            "once": weights(once),
            "twice": weights(twice),
        }
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_skipped_updates: updates with a gradient that is not finite on one rank alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings, UserError
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training import trainer as trainer_module
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare
from tests.support.ranks import measure_cases

trainer_module.SKIPPED_UPDATES = 3  # fewer steps


def start(case: dict, mesh: Mesh, device: torch.device) -> Trainer:
    return Trainer(Settings.model_validate(case["settings"]), mesh, device)


def train(trainer: Trainer, step: int, folder: Path) -> dict[str, float]:
    """One step on the fixed batch; its metrics."""
    batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
    trainer.scorer.compute_log_probs(batch)
    trainer.update(step, batch, lambda done, total: None)
    return batch.metrics


def scored_apart(trainer: Trainer, folder: Path) -> float:
    """The largest difference between a step's log-probs and those of each sequence packed alone."""
    batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
    trainer.scorer.compute_log_probs(batch)
    trajectories = list(iter_trajectories(batch.minibatches))
    rows = [trainer.policy.pack([t]) for t in trajectories]
    alone = [row.split(out[0]) for row, out in zip(rows, trainer.policy.logprobs(rows), strict=True)]
    return max(np.abs(t.old - logp.numpy()).max() for ((t, logp),) in alone)


def state(trainer: Trainer) -> dict[str, torch.Tensor | int]:
    """Weights, master weights, moments and step counts of this rank."""
    tensors: dict[str, torch.Tensor | int] = {
        f"weight {n}": p.detach().clone() for n, p in trainer.policy.named_parameters()
    }
    optimizer = trainer.policy._optimizer
    for i, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for j, group in enumerate(part.optimizer.param_groups):
            tensors |= {f"{key} {i} {j}": group[key] for key in ("step", "k") if key in group}
            for k, p in enumerate(group["params"]):
                tensors[f"master {i} {j} {k}"] = p.detach().clone()
                tensors |= {f"{n} {i} {j} {k}": v.clone() for n, v in part.optimizer.state[p].items()}
    return tensors


def differing(a: dict, b: dict) -> dict[str, float]:
    """Key -> largest difference, of those that are not the same bits."""
    assert a.keys() == b.keys()
    pairs = {key: (torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a}
    return {key: float((x - y).abs().max()) for key, (x, y) in pairs.items() if not torch.equal(x, y)}


def measure(case: dict, folder: Path, device: torch.device) -> dict:
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)
    trainer, reference = start(case, mesh, device), start(case, mesh, device)
    for each in (trainer, reference):
        train(each, 1, folder)
    scored = scored_apart(trainer, folder)
    before = state(trainer)
    name, poisoned = next((n, p) for n, p in trainer.policy.named_parameters() if case["parameter"] in n)
    hook = poisoned.register_hook(lambda g: g * torch.inf) if mesh.rank == case["rank"] else None
    metrics = train(trainer, 2, folder)
    changed = differing(before, state(trainer))
    if hook:
        hook.remove()
    after = [train(each, 3, folder)["policy/grad_norm"] for each in (trainer, reference)]
    apart = differing(state(trainer), state(reference))

    if mesh.rank == case["rank"]:
        poisoned.register_hook(lambda g: g * torch.nan)
    error = ""
    try:
        train(trainer, 4, folder)
        train(trainer, 5, folder)
    except UserError as e:
        error = str(e)
    everyone = gather_objects(
        {"metrics": metrics, "changed": changed, "after": after, "apart": apart, "said": error, "name": name}
        | {"scored": float(scored)}
    )
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


if __name__ == "__main__":
    measure_cases(measure)

"""One rank of test_old_from_update: the same step with the old policy's log-probs from each source."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray

from rpg_megatron.config import Settings
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare
from tests.support.ranks import measure_cases

Old = dict[tuple[int, int], NDArray[np.float32]]
"""By group and sample."""


class Step:
    """A step by a trainer of its own, with the gradients of each update."""

    def __init__(self, sections: dict[str, Any], old: str, mesh: Mesh, folder: Path, device: torch.device):
        training = sections["training"] | {"old": old}
        self.trainer = Trainer(Settings.model_validate(sections | {"training": training}), mesh, device)
        self.policy = self.trainer.policy
        if self.trainer.anchor:  # else it would be the policy
            for _, p in self.policy.named_parameters():
                p.data.mul_(1.01)
        self.gradients: list[dict[str, torch.Tensor]] = []
        step = self.policy._optimizer.step

        def watched() -> object:
            self.gradients.append({n: p.main_grad.clone() for n, p in self.policy.trained_parameters()})
            return step()

        self.policy._optimizer.step = watched
        self.batch = prepare(self.trainer, pickle.loads((folder / "batch.pkl").read_bytes()))

    def train(self) -> Old:
        """Returns ``old`` as it is before the first weight changes."""
        before = [p.detach().clone() for _, p in self.policy.named_parameters()]
        self.trainer.scorer.compute_log_probs(self.batch)
        self.trainer.start_update(self.batch)
        pairs = zip(self.policy.named_parameters(), before, strict=True)
        assert all(torch.equal(p, value) for (_, p), value in pairs), "a weight has changed"
        old = {(t.group, t.sample): t.old.copy() for t in iter_trajectories(self.batch.minibatches)}
        self.trainer.update(1, self.batch, lambda done, total: None)
        return old

    def score_first(self) -> Old:
        """``old`` of the first mini-batch by a pass over its rows."""
        rows = [self.policy.pack(row) for row in self.batch.minibatches[0]]
        return {
            (t.group, t.sample): logp.numpy().copy()
            for row, out in zip(rows, self.policy.logprobs(rows), strict=True)
            for t, logp in row.split(out[0])
        }


def largest(a: Old, b: Old) -> float:
    """The largest difference of the log-probs of ``a``."""
    return max((float(np.abs(a[key] - b[key]).max(initial=0)) for key in a), default=0.0)


def gradient_gaps(a: Step, b: Step) -> list[float]:
    """Of each update, the largest difference of an element relative to the norm of this rank's gradient."""
    gaps = []
    for own, other in zip(a.gradients, b.gradients, strict=True):
        norm = sum(float(g.double().square().sum()) for g in own.values()) ** 0.5
        gaps.append(max(float((own[n] - other[n]).abs().max()) for n in own) / norm)
    return gaps


def anchors(step: Step) -> Old:
    return {(t.group, t.sample): t.anchor for t in iter_trajectories(step.batch.minibatches)}


def measure(case: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    sections = case["settings"]
    mesh = start_mesh(Settings.model_validate(sections).parallel)
    by_pass = Step(sections, "pass", mesh, folder, device)
    by_update = Step(sections, "update", mesh, folder, device)
    direct = by_update.score_first()
    old, from_update = by_pass.train(), by_update.train()
    result = {
        "auto": Trainer(Settings.model_validate(sections), mesh, device)._old_from,
        "first": [list(key) for key in direct],
        "same_as_its_pass": all(direct[key].tobytes() == from_update[key].tobytes() for key in direct),
        "old": largest(old, from_update),
        "anchor": largest(anchors(by_pass), anchors(by_update)),
        "anchor_differs": largest(anchors(by_update), from_update),
        "gradients": gradient_gaps(by_pass, by_update),
        "metrics": [by_pass.batch.metrics, by_update.batch.metrics],
    }
    if "correction" not in sections:  # else the engine's log-probs exclude it
        by_engine = Step(sections, "engine", mesh, folder, device)
        for t in iter_trajectories(by_engine.batch.minibatches):  # an engine without any mismatch
            t.behaviour = np.where(t.mask, old[t.group, t.sample], 0).astype(np.float32)
        by_engine.train()
        compared = {(t.group, t.sample): t.old for t in by_engine.batch.compared or ()}
        result |= {
            "engine_gradients": gradient_gaps(by_pass, by_engine),
            "compared": [list(key) for key in compared],
            "compared_gap": largest(compared, old),
            "leads": mesh.leads,
        }
    everyone = gather_objects(result)
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


if __name__ == "__main__":
    measure_cases(measure)

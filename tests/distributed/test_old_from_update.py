"""``training.old``: the old policy's log-probs from the first update's forward pass, or from the engine.

Proved with real Megatron in fp32, for dense models and a mixture with replayed experts: no weight changes
before the batch is checked; ``old`` of the first mini-batch has the bits of a pass over the same rows; with
one update a step all of ``old``, and every gradient and metric, are those of ``training.old: pass``, and auto
chooses it; with several, gradients differ by rounding (the pass packs other rows). With the engine's
log-probs, the guard still gets the trainer's own of the first mini-batch. Not covered: kernels of a GPU,
where a forward pass with gradient may round differently from one without; w is exactly 1 there all the same.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray

from rpg_megatron.config import Settings
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare
from tests.support.layouts import FULL, SELECTIVE, SP, make_case, make_layout_model, make_masked_batch
from tests.support.mixtures import EXPERTS, LAYERS, SIZES, TOPK
from tests.support.ranks import ranks
from tests.support.tiny_models import make_model

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


@ranks(2)
def measure_all(folder: Path, cases: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Of each case, what each rank says."""
    return {name: measure(case["settings"], folder, torch.device("cpu")) for name, case in cases.items()}


def measure(sections: dict[str, Any], folder: Path, device: torch.device) -> list[dict[str, Any]]:
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
    return everyone


FIXED = {"objective": {"beta": 0.05, "entropy_bonus": 0.1}, "anchor": {"type": "fixed"}}
CORRECTED = {"correction": {"type": "truncate", "level": "sequence", "high": 1.5}, "rollout": {"ahead": 2}}
GSPO = {
    "objective": {"type": "gspo", "low": 0.1, "high": 0.1},
    "advantage": {"type": "grpo"},
    "aggregation": {"type": "sequence_mean"},
}
Layouts = dict[str, tuple[dict[str, Any], int, dict[str, Any]]]
"""Name -> (parallel settings, mini-batches, other settings)."""
DENSE: Layouts = {
    "PP2 x VPP2, full recompute, fixed anchor": ({"pipeline": 2, "virtual": 2}, 1, FULL | FIXED),
    "DP2, correction of sequences": ({"data": 2}, 1, CORRECTED),
    "CP2, two epochs of two updates": ({"context": 2}, 2, {"ppo_epochs": 2}),
}
MORE_DENSE: Layouts = {
    "TP2+SP, old anchor": (SP, 1, {}),
    "PP2, gspo": ({"pipeline": 2}, 1, GSPO),
    "CP2, selective recompute": ({"context": 2}, 1, SELECTIVE),
    "DP2, four updates": ({"data": 2}, 4, FIXED),
}
MIXTURE: Layouts = {"DP2, EP2, replay, selective recompute": ({"data": 2, "expert": 2}, 1, SELECTIVE)}
MORE_MIXTURE: Layouts = {
    "PP2, replay, full recompute": ({"pipeline": 2}, 1, FULL | FIXED),
    "TP2+SP, EP2, replay, two updates": ({**SP, "expert": 2}, 2, FULL),
}


@pytest.mark.parametrize(
    ("mixture", "layouts"),
    [
        pytest.param(False, DENSE, id="dense"),
        pytest.param(True, MIXTURE, id="mixture"),
        pytest.param(False, MORE_DENSE, id="more dense", marks=pytest.mark.long),
        pytest.param(True, MORE_MIXTURE, id="more mixtures", marks=pytest.mark.long),
    ],
)
def test_the_same_step_from_every_source(
    tmp_path: Path, mixture: bool, layouts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_masked_batch()
    draw = np.random.default_rng(0)
    for i, t in enumerate(batch):
        t.reward, t.group, t.sample = math.sin(i), i // 3, i % 3
        t.behaviour = np.where(t.mask, -5.5 + draw.normal(0, 0.3, len(t.response)), 0).astype(np.float32)
        if mixture:
            routes = draw.random((t.length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK]
            t.routes = routes.astype(np.uint8)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    if mixture:
        make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **SIZES)
    else:
        make_layout_model(tmp_path / "model", tied=False)
    cases = {}
    for name, (parallel, minibatches, more) in layouts.items():
        more = dict(more)
        training = {"minibatches": minibatches, "tokens_per_microbatch": 100, "logprob_chunk": 17}
        training["ppo_epochs"] = more.pop("ppo_epochs", 1)
        if mixture:
            training["router_replay"] = "rollout"
        rollout = {"prompts_per_step": 4, "samples_per_prompt": 3, "temperature": 0.7} | more.pop(
            "rollout", {}
        )
        settings = {"training": training, "rollout": rollout, **more}
        settings["optimizer"] = {"lr": 1e-6, "warmup_steps": 0, "distributed": False}
        cases[name] = make_case(tmp_path / "model", parallel, 0, settings)
    results = measure_all(tmp_path, cases)

    lines = []
    for name, (_, minibatches, more) in layouts.items():
        ranks = results[name]
        one = minibatches == 1
        for rank in ranks:
            assert rank["auto"] == ("update" if one else "pass"), name
            assert rank["same_as_its_pass"], name
            assert rank["first"], name
            assert rank["old"] <= (0 if one else 1e-5), name
            assert rank["anchor"] <= (0 if one else 1e-5), name
            assert (rank["anchor_differs"] > 1e-3) == ("anchor" in more), name
            assert len(rank["gradients"]) == minibatches * more.get("ppo_epochs", 1), name
            assert max(rank["gradients"]) <= 1e-6, name
            if "engine_gradients" in rank:
                assert max(rank["engine_gradients"]) <= 1e-6, name
                assert rank["compared_gap"] <= (0 if one else 1e-5), name
                assert rank["compared"] == (rank["first"] if rank["leads"] else []), name
        by_pass, by_update = ranks[0]["metrics"]
        assert by_pass.keys() == by_update.keys(), name
        for key, value in by_pass.items():
            if key.startswith("routes/") and "mismatch" in key and not one:
                continue  # one micro-batch is scored without replay, and it is another one
            padded = key.startswith("moe/") and not one  # padding is routed, too, and other rows have other
            assert value == pytest.approx(by_update[key], rel=0.1 if padded else 1e-5, abs=1e-6), (name, key)
        assert by_update["policy/entropy"] > 1, name
        lines.append(f"{name:45s} old {ranks[0]['old']:.1e}, gradients {max(ranks[0]['gradients']):.1e}")
    with capsys.disabled():
        print("\nold log-probs by a pass and by the first update: largest differences\n" + "\n".join(lines))

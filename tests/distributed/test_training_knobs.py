"""Settings of a step's batch besides the loss: a KL in the reward, several passes over the batch.

Proved with real Megatron on two data-parallel ranks in fp32: with ``reward.kl`` the advantages on every rank
are those of rewards minus the KL of the response's sampled tokens, of all its rows if it has branches, in its
group; two epochs are the same
updates, bit for bit, as a batch whose mini-batches come twice, with the old policy from before the first. Not
covered: the gradient of a KL in the reward (tests/unit/test_baselines.py).
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpg_megatron.config import Settings
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare
from tests.support.layouts import make_case, write_rewarded_batch
from tests.support.ranks import ranks


def make(case: dict[str, Any], mesh: Mesh, epochs: int) -> Trainer:
    sections = case["settings"] | {"training": case["settings"]["training"] | {"ppo_epochs": epochs}}
    return Trainer(Settings.model_validate(sections), mesh, torch.device("cpu"))


def scored(trainer: Trainer, folder: Path) -> Batch:
    batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
    trainer.scorer.compute_log_probs(batch)
    return batch


def weights(trainer: Trainer) -> float:
    """A number that almost surely changes with any bit of a weight."""
    return sum(p.detach().double().sin().sum().item() for _, p in trainer.policy.named_parameters())


@ranks(2)
def train(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)

    trainer, calls = make(case, mesh, 2), []
    batch = scored(trainer, folder)
    before = [t.old.copy() for t in batch.mine]
    trainer.update(1, batch, lambda done, total: calls.append([done, total]))
    assert all(np.array_equal(t.old, old) for t, old in zip(batch.mine, before, strict=True))
    epochs = weights(trainer)
    second = scored(trainer, folder)  # the policy has left the anchor
    rows = [
        (t.group, t.sample, float((t.old.astype(np.float64) - t.anchor)[t.mask].sum()), t.advantage)
        for t in iter_trajectories(second.minibatches)
    ]
    everyone = gather_objects(rows)

    once, twice = make(case, mesh, 1), make(case, mesh, 1)
    first = scored(twice, folder)
    first.minibatches = first.minibatches * 2
    for each, share in ((once, scored(once, folder)), (twice, first)):
        each.update(1, share, lambda done, total: None)
    return {
        "ranks": everyone,
        "row": second.metrics,
        "calls": calls,
        "epochs": epochs,
        "once": weights(once),
        "twice": weights(twice),
    }


def test_kl_in_the_reward_and_several_passes(tmp_path: Path) -> None:
    batch = write_rewarded_batch(tmp_path, 3)
    branches = {i: pickle.loads(pickle.dumps(batch[i])) for i in (1, 4, 11)}
    for i, branch in branches.items():  # another row of the same response
        branch.branch, branch.response = 1, branch.response[::-1].copy()
        assert (branch.response != batch[i].response).any()
    rows = [row for i, t in enumerate(batch) for row in (t, *([branches[i]] if i in branches else []))]
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(rows))
    case = make_case(
        tmp_path / "model",
        {"data": 2},
        0,
        {
            "objective": {"beta": 0.0},
            "anchor": {"type": "fixed"},
            "reward": {"kl": {"coefficient": 0.5}},
            "training": {
                "minibatches": 2,
                "ppo_epochs": 2,
                "tokens_per_microbatch": 100,
                "logprob_chunk": 17,
            },
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0, "distributed": False},
        },
    )
    result = train(tmp_path, case)

    by_sample = defaultdict(list)
    for group, sample, *values in itertools.chain.from_iterable(result["ranks"]):
        by_sample[group, sample].append(values)
    assert [len(by_sample[t.group, t.sample]) for t in batch] == [1 + (i in branches) for i in range(12)]
    kl = np.array([sum(kl for kl, _ in by_sample[t.group, t.sample]) for t in batch])
    assert np.abs(kl).min() > 1e-6
    rewards = np.array([t.reward for t in batch]) - 0.5 * kl
    expected = (rewards.reshape(4, 3) - rewards.reshape(4, 3).mean(1, keepdims=True)).ravel()
    for t, advantage in zip(batch, expected, strict=True):
        for _, actual in by_sample[t.group, t.sample]:
            assert actual == pytest.approx(advantage, abs=1e-6)
    row = result["row"]
    assert row["kl/response"] == pytest.approx(kl.mean(), rel=1e-9)
    assert row["reward/kl"] == pytest.approx(-0.5 * kl.mean(), rel=1e-9)

    assert result["calls"] == [[i, 4] for i in range(4)]
    assert result["epochs"] == result["twice"] != result["once"]

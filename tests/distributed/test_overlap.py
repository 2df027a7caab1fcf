"""Reducing gradients during backward and gathering weights during the next forward changes no number.

Why: both leave something unfinished behind when a call returns. A gradient that is reduced before its last
micro-batch is in, or a weight that is read before it has been gathered, gives plausible numbers. Proved, on
real Megatron over gloo in float32 with a bucket for every tensor: two steps of two updates each, the second
of which starts on weights that other ranks still hold, end at the weights, losses, norms and log-probs of
runs without overlap. Ranks do differ between the updates of a step, so the gather is deferred, and agree when
the step is over: that is when weights are published, saved and used to score. Also of a mixture whose
routers have a bias that is not trained.
Not covered: NCCL, that it is faster.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings
from rpg_megatron.policy import optimizer
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.layouts import SMOOTH, make_case, make_layout_model, ragged_batch
from tests.support.rank_policy import checkpoint_policy, cut_unevenly
from tests.support.ranks import ranks
from tests.support.tiny_models import make_model

BUCKET = 1000
"""Minimum parameters of a bucket: about one tensor in each; by default all would share one."""


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    policy = checkpoint_policy(settings, mesh, torch.device("cpu"))
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


@ranks(2)
def run_all(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    optimizer.DistributedDataParallelConfig = functools.partial(  # type: ignore[misc,assignment]
        optimizer.DistributedDataParallelConfig, bucket_size=BUCKET
    )
    return {name: run(case, folder) for name, case in cases.items()}


def run_both(folder: Path, world: int, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Layout -> results with overlap and without, of the model in ``folder``."""
    (folder / "batch.pkl").write_bytes(pickle.dumps(ragged_batch(5, longest=90, count=9)))
    cases = {}
    for name, parallel in layouts.items():
        for overlap in (False, True):
            # A large epsilon: where gradients are tiny, Adam would otherwise blow rounding errors up.
            settings = {
                **SMOOTH,
                "optimizer": {"distributed": "plain" not in name, "overlap": overlap, "eps": 1e-3},
            }
            cases[f"{name}, {overlap}"] = make_case(folder / "model", parallel, 6, settings)
    return run_all(folder, cases, world=world)


def compare(results: dict[str, Any], layout: str) -> None:
    plain, overlapped = results[f"{layout}, False"], results[f"{layout}, True"]
    assert overlapped["buckets"] > plain["buckets"], layout
    assert plain["within"] == [True] * 4, layout
    assert overlapped["within"] == ["plain" in layout] * 4, layout
    for actual, expected in zip(overlapped["reports"], plain["reports"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5), layout
    for weights, plain_weights in zip(overlapped["weights"], plain["weights"], strict=True):
        for key, weight in plain_weights.items():
            torch.testing.assert_close(
                weights[key], weight, atol=1e-6, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
    for actual, expected in zip(overlapped["scored"], plain["scored"], strict=True):
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), atol=2e-5, rtol=0)


@pytest.mark.long
def test_overlap_changes_no_number_on_two_ranks(tmp_path: Path) -> None:
    make_layout_model(tmp_path / "model", tied=False)
    compare(run_both(tmp_path, 2, {"DP2": {"data": 2}}), "DP2")


def test_a_bias_that_is_not_trained_does_not_stop_the_overlap(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "glm4_moe", noise=0.08, vocab_size=251)
    compare(run_both(tmp_path, 2, {"DP2": {"data": 2}}), "DP2")


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_overlap_changes_no_number_on_four_ranks(tmp_path: Path, tied: bool) -> None:
    layouts = {
        "TP2xDP2+SP": {"tensor": 2, "data": 2, "sequence": True},
        "PP2xDP2": {"pipeline": 2, "data": 2},
        "PP2xVPP2xDP2": {"pipeline": 2, "virtual": 2, "data": 2},
        "CP2xDP2": {"context": 2, "data": 2},
        "DP4, plain": {"data": 4},
    }
    make_layout_model(tmp_path / "model", tied=tied)
    results = run_both(tmp_path, 4, layouts)
    for layout in layouts:
        compare(results, layout)

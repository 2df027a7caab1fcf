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

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import SMOOTH, make_case, make_layout_model, ragged_batch
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model


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
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.distributed.overlap_worker", world, folder)
    return torch.load(folder / "results.pt")


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

"""Optimizer state and gradients leave the device for the engines and come back with the same bits.

Why: a main weight that lost its place among the model's, or a moment that came back as zero, trains on
without an error. Proved with real Megatron over gloo: while offloaded, only the weights remain on the
device, and they still score; after the reload, and after the next update, weights, main weights, moments and
steps are those of a trainer that never offloaded; host memory is used again. For bfloat16 and float32, where
main weights are the weights. Not covered: GPUs, with another memory (tests/gpu).
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.layouts import make_case, write_rewarded_batch
from tests.support.ranks import run_ranks

CASES = {
    "bfloat16, distributed": ("bfloat16", True),
    "float32, distributed": ("float32", True),
}


def test_offloaded_state_returns_with_the_same_bits(tmp_path: Path) -> None:
    write_rewarded_batch(tmp_path, 4)
    cases = {
        name: make_case(
            tmp_path / "model",
            {"data": 2},
            0,
            {
                "training": {"minibatches": 2, "tokens_per_microbatch": 100},
                "precision": {"dtype": dtype},
                "optimizer": {"lr": 1e-3, "distributed": distributed},
            },
        )
        for name, (dtype, distributed) in CASES.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    for name, result in run_ranks("tests.distributed.offload_for_engines_worker", 2, tmp_path).items():
        dtype, distributed = CASES[name]
        for rank in result["ranks"]:
            empty, offloaded, again, remaining, weights = rank["bytes"]
            share = 0.5 if distributed else 1.0
            moments, main = (4, 2) if dtype == "bfloat16" else (2, 0)  # times the weights' bytes
            assert 0.9 * share <= offloaded / (weights * (moments + main)) <= 1.1 * share + 0.1, (name, rank)
            assert (empty > 0) == (main > 0), name
            assert 0.9 <= rank["gradients"] / (weights * (2 if dtype == "bfloat16" else 1)) <= 1.1, (
                name,
                rank,
            )
            assert (again, remaining) == (0, 0), name
            assert rank["released"], name
            assert rank["scores"], name
            assert rank["kept"], name
            assert rank["returned"] == rank["apart"] == {}, name

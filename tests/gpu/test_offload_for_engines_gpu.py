"""Offloading the optimizer state frees GPU memory, and after every reload the GPU holds what it held before.

Why: memory that grows by a little in each step ends a run after hours. The same process as
test_offload_for_engines, on one GPU: same bits, and allocated and reserved bytes that do not grow over five
turns. Not covered: what engines hold (test_colocated_gpu).
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.layouts import make_case, write_rewarded_batch
from tests.support.ranks import run_ranks


def test_memory_is_flat(tmp_path: Path) -> None:
    write_rewarded_batch(tmp_path, 4)
    settings = {
        "training": {"minibatches": 2, "tokens_per_microbatch": 128},
        "precision": {"dtype": "bfloat16"},
        "optimizer": {"lr": 1e-3},
    }
    case = make_case(tmp_path / "model", {}, 0, settings)
    (tmp_path / "cases.json").write_text(json.dumps({"one GPU": case}))
    worker = "tests.distributed.offload_for_engines_worker"
    (rank,) = run_ranks(worker, 1, tmp_path, "cuda", fresh=True)["one GPU"]["ranks"]
    assert rank["returned"] == rank["apart"] == {}
    assert rank["released"]
    loaded, away = rank["memory"]
    assert len(set(loaded)) == len(set(away)) == 1
    # The other trainer, which never offloads, keeps its own memory, and so do this one's weights.
    _, state_bytes, _, _, weights = rank["bytes"]
    offloaded = state_bytes + rank["gradients"]
    assert offloaded > 5 * weights
    for freed in rank["freed"]:
        assert abs(freed - offloaded) <= offloaded / 100

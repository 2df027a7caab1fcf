"""What the hosts ask of the GPUs in a sync does not depend on the number of slices.

Why: each call of the host takes some microseconds, so that a mixture's 18,867 tensors took seconds with
eleven calls for each, and no GPU was busy. A trainer rank that publishes and an engine worker that checks
and loads, by CUDA IPC, on fake GPUs (sync_calls_worker); what the kernels compute is test_slice_kernels'. The
first sync makes the tables. Not covered: vLLM's own loading (test_load_plan), time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

SLICES = {"0.6b": 310, "4b": 398, "8b": 399, "30b-a3b": 18_867}


@pytest.mark.parametrize(
    "shapes",
    [
        ("0.6b",),
        pytest.param(("4b", "8b", "30b-a3b"), marks=[pytest.mark.long, pytest.mark.timeout(1600)]),
    ],
)
def test_calls_of_a_sync(shapes: tuple[str, ...], tmp_path: Path) -> None:
    results = run_ranks("tests.distributed.sync_calls_worker", 1, tmp_path, *shapes, fresh=True, timeout=1500)
    for shape in shapes:
        result = results[shape]
        assert result["faults"] == []
        assert result["slices"] == SLICES[shape]
        trainer, engine = result["trainer, second"], result["engine, second"]
        assert trainer["launches"] == 1
        assert engine["launches"] == 2
        for side in (trainer, engine):
            assert side["calls"] + side["launches"] <= 10
            assert side["waits"] <= 2
        # The tables are what is saved: without them each slice is asked for.
        assert result["trainer, first"]["calls"] > 2 * result["slices"]
        assert result["engine, first"]["calls"] > 8 * result["slices"]

"""BF16 by Transformer Engine against float32 and transformers, and each FP8 recipe against BF16.

Why: a fused norm with another epsilon, a packed row that attention reads across sequences or a scale that is
never set give numbers that look like noise. Bounds: BF16 as near to float32 as transformers' BF16 is, but
for a factor of two; FP8 within what three bits of mantissa explain. The figures themselves:
benchmarks/mismatch.py. Not covered: large models, tensor parallelism.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_alone


def test_precisions_are_as_far_apart_as_their_bits(tmp_path: Path) -> None:
    gaps = run_alone("tests.gpu.numbers_worker", tmp_path)
    assert gaps["bf16"][0] <= 2 * gaps["transformers"][0]
    assert gaps["bf16"][1] <= 0.05
    for recipe in ("blockwise", "tensorwise", "delayed", "blockwise+params"):
        logp, gradient = gaps[recipe]
        assert 0 < logp <= 0.1, recipe
        assert 0 < gradient <= 0.4, recipe

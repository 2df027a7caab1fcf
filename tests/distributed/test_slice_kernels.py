"""Checksums and copies of many slices in one launch, by Triton's interpreter, against those of the CPU.

Why: a slice that a table describes wrongly is another weight in the engine, and its checksum is that of the
same wrong memory. So both are compared with torch and the CPU's checksum, of random slices: elements of 1 to
8 bytes, cut and turned, at any address. Not covered: the compiled kernels (tests/gpu), and their speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    "number",
    [60, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3000)])],
)
def test_random_slices(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run_ranks("tests.distributed.slices_worker", 1, tmp_path, str(number), fresh=True, timeout=2900)
    assert result["wrong"] == []
    assert result["launches"] == 4  # one for each size of elements
    assert result["sums"] > 0.99 * number  # they differ, but for some of a single byte
    assert result["empty"] == 0

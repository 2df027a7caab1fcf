"""Transformer Engine's kernels sort the tokens of experts as Megatron's torch code does.

Why: on a GPU mixtures train with them (``moe_permute_fusion``), and no other test without one runs them.
They are written in Triton, so its interpreter runs the real ones on a CPU: forward and backward, with an
expert that gets no token. Not covered: their choice of block sizes; other kernels (test_te_layers).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_alone


def test_tokens_are_sorted_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run_alone("tests.cuda.sorting_worker", tmp_path)
    assert result["idle"] == 0
    for name, gaps in result["gaps"].items():
        assert max(gaps) < 1e-6, f"{name}: {gaps}"

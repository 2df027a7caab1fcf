"""What vLLM's model runner V2 samples and reports, by its own Triton kernels, against torch.

Why: on a GPU the log-probs that training corrects by, the temperature and the seeded draws come from these
kernels; on a CPU vLLM has others. Triton's interpreter runs them on the CPU (kernels_worker). Not covered:
the compiled kernels, whose exponential and logarithm round otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

CHI2 = 31.3
"""Exceeded by chance once in 1,000 times, with twelve kinds."""


def test_sampling_kernels_agree_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # vLLM then takes Triton without a driver
    result = run_ranks("tests.cuda.kernels_worker", 1, tmp_path, fresh=True)
    assert result["temperature"] == 0.0
    assert result["logprobs"] < 1e-5
    assert result["ranks"]
    assert result["greedy"]
    # A response depends on its seed and position only, not on what else is in the batch.
    assert result["alone"]
    assert result["turned"]
    for way in ("by position", "by seed"):
        expected = [sum(result[way]) * chance for chance in result["chances"]]
        chi2 = sum((n - e) ** 2 / e for n, e in zip(result[way], expected, strict=True))
        assert chi2 < CHI2, way

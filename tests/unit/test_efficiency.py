"""Utilisation and MFU of a step: of known cards only, and the arithmetic of plan.

Why: a figure that is invented for an unknown card would be believed. Proved with made-up times and readings.
Not covered: a real GPU, whose readings and names only a GPU gives.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from rpg_megatron.config import Settings
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.training import efficiency
from rpg_megatron.training.efficiency import Efficiency, UtilizationSampler, peak_flops
from tests.support.tiny_models import TINY
from tests.support.trajectories import make_trajectory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA GB200", None),
    ],
)
def test_peaks_are_of_known_cards(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def make(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    device: torch.device = CUDA,
    dtype: str = "bfloat16",
    epochs: int = 1,
    old: str = "auto",
) -> Efficiency:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(efficiency, "UtilizationSampler", lambda device: SimpleNamespace())
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "precision": {"dtype": dtype}}
    raw |= {
        "parallel": {"tensor": 2},
        "anchor": {"type": "fixed"},
        "training": {"ppo_epochs": epochs, "old": old},
    }
    return Efficiency(Settings.model_validate(raw), TINY, device)


def test_mfu_counts_three_passes_an_update_and_one_a_policy(monkeypatch) -> None:
    tracker = make(monkeypatch, "NVIDIA H100 80GB HBM3")
    trajectories = [make_trajectory(p, r, prompt_id=p) for p, r in ((30, 10), (100, 60))]
    row = tracker.batch_metrics(index_of(trajectories))
    heads, kv = TINY.num_heads * TINY.head_dim, TINY.num_kv_heads * TINY.head_dim
    layer = TINY.hidden_size * (2 * heads + 2 * kv + 3 * TINY.ffn_hidden_size)
    parameters = TINY.num_layers * layer + TINY.hidden_size * TINY.vocab_size
    flops = sum(2 * parameters * n + 2 * n**2 * heads * TINY.num_layers for n in (40, 160))
    assert row == {"step/tokens": 200.0, "step/forward_flops": pytest.approx(flops)}
    row |= {"time/update": 2.0, "time/logprobs": 1.0, "time/step": 10.0}
    assert tracker.mfu(row) == {
        "gpu/mfu_update": pytest.approx(3 * flops / 2 / (2 * 989e12)),
        "gpu/mfu_logprobs": pytest.approx(2 * flops / 1 / (2 * 989e12)),
        "gpu/mfu": pytest.approx(5 * flops / 10 / (2 * 989e12)),
    }
    # Two passes of updates over a batch: its log-probs are computed once all the same.
    assert make(monkeypatch, "NVIDIA H100 80GB HBM3", epochs=2).mfu(row) == {
        "gpu/mfu_update": pytest.approx(6 * flops / 2 / (2 * 989e12)),
        "gpu/mfu_logprobs": pytest.approx(2 * flops / 1 / (2 * 989e12)),
        "gpu/mfu": pytest.approx(8 * flops / 10 / (2 * 989e12)),
    }
    # The first of 16 updates gives the log-probs of its mini-batch.
    from_update = make(monkeypatch, "NVIDIA H100 80GB HBM3", old="update").mfu(row)
    assert from_update["gpu/mfu_logprobs"] == pytest.approx((1 + 15 / 16) * flops / (2 * 989e12))
    for unknown in (
        make(monkeypatch, "NVIDIA GeForce RTX 4090"),
        make(monkeypatch, "NVIDIA H100 80GB HBM3", dtype="float32"),
        make(monkeypatch, "", device=CPU),
    ):
        assert unknown.mfu(row) == {}


def test_utilization_is_sampled_until_the_driver_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "_SAMPLE_SECONDS", 0.001)
    readings, ended = [50, 100], threading.Event()

    def read(device: torch.device) -> int:
        if not readings:
            ended.set()
            raise RuntimeError("the driver does not tell")
        return readings.pop(0)

    sampler = UtilizationSampler(CUDA, read)
    assert ended.wait(60)
    assert sampler.pop() == (1.5, 2)
    assert sampler.pop() == (0.0, 0)
    assert UtilizationSampler(CPU, read).pop() == (0.0, 0)

"""Throughput, memory, GPU utilisation and MFU of a step, for its row of metrics."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.policy.device import peak_memory_bytes

_PEAKS = {
    r"A[18]00": 312e12,
    r"L40S": 362e12,
    r"H100 PCIe": 756e12,
    r"H[12]00 NVL": 835e12,
    r"H[128]00": 989e12,
    r"B200": 2250e12,
}
"""Pattern of a GPU's name -> dense bfloat16 FLOP/s, from NVIDIA's data sheets. The first match counts."""
_SAMPLE_SECONDS = 1.0


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name in torch; None: unknown, or a MIG instance."""
    if "MIG" in name:
        return None
    return next((peak for pattern, peak in _PEAKS.items() if re.search(rf"\b{pattern}\b", name)), None)


class UtilizationSampler:
    """Samples the utilisation of this rank's GPU once a second on a thread; does nothing on a CPU."""

    def __init__(self, device: torch.device, read: Callable[[torch.device], int] = torch.cuda.utilization):
        """read: percent of recent time in which a kernel ran; raises if the driver does not report it."""
        self._device, self._read = device, read
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sum, self._count = 0.0, 0
        if device.type == "cuda":
            threading.Thread(target=self._run, name="gpu utilization", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(_SAMPLE_SECONDS):
            try:
                share = self._read(self._device) / 100
            except Exception:  # no nvidia-ml-py, or a MIG instance: the metric is absent
                return
            with self._lock:
                self._sum, self._count = self._sum + share, self._count + 1

    def pop(self) -> tuple[float, int]:
        """Sum of the samples, each from 0 to 1, and their number, since the last call."""
        with self._lock:
            samples = self._sum, self._count
            self._sum, self._count = 0.0, 0
        return samples

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()


class Efficiency:
    """Efficiency metrics of one rank; ``metrics`` is collective."""

    def __init__(self, settings: Settings, shape: ModelShape, device: torch.device):
        self._shape, self._device = shape, device
        self._world = settings.parallel.world
        self._passes = settings.scoring_passes  # a teacher's own passes do not count
        self._epochs = settings.training.ppo_epochs
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        # The table has peaks of bfloat16 only.
        self._peak = peak if settings.precision.dtype == "bfloat16" else None
        self._sampler = UtilizationSampler(device)

    def batch_metrics(self, index: BatchIndex, shared: tuple[int, int] = (0, 0)) -> dict[str, float]:
        """``step/*`` of a batch: prompt and response tokens, and FLOPs of a forward pass over them.

        shared: prompt tokens that an update does not compute again, and their squares; FLOPs exclude them.
        """
        lengths = (index.prompt_length + index.response_length).astype(np.float64)
        tokens, squares = lengths.sum(), sum(map(self._shape.squares, lengths))
        flops = self._shape.forward_flops(tokens - shared[0], squares - shared[1])
        row = {"step/tokens": float(tokens), "step/forward_flops": float(flops)}
        return row | ({"step/shared_tokens": float(shared[0])} if shared[0] else {})

    def metrics(self, row: dict[str, float]) -> dict[str, float]:
        """``time/unix``, and for a step ``throughput/*``, ``memory/*`` and on GPUs ``gpu/*``. Collective.

        row: the step's metrics, with ``step/*`` and ``time/*``; used on rank 0 only.
        """
        peak = torch.tensor([peak_memory_bytes(self._device)], dtype=torch.float64, device=self._device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        values = {"time/unix": round(time.time(), 3)}
        if self._device.type == "cuda":
            busy = torch.tensor(self._sampler.pop(), dtype=torch.float64, device=self._device)
            dist.all_reduce(busy)
            total, count = busy.tolist()
            values |= {"gpu/utilization": total / count} if count else {}
        if "step/tokens" not in row or "time/step" not in row:
            return values
        rate = row["step/tokens"] / max(row["time/step"], 1e-9)
        values |= {"throughput/tokens_per_second": rate, "memory/peak_bytes": peak.item()}
        return values | self.mfu(row)

    def mfu(self, row: dict[str, float]) -> dict[str, float]:
        """``gpu/mfu*``: the model's FLOPs relative to the peak of the GPUs; empty if the peak is unknown.

        An update counts as three forward passes over its tokens. Recomputation and the engines' FLOPs do not
        count.
        """
        if self._peak is None or "step/forward_flops" not in row:
            return {}
        forward = row["step/forward_flops"] / (self._peak * self._world)
        update, scoring = 3 * self._epochs * forward, self._passes * forward
        work = {"update": update, "logprobs": scoring, "step": update + scoring}
        keys = {"update": "gpu/mfu_update", "logprobs": "gpu/mfu_logprobs", "step": "gpu/mfu"}
        return {
            key: work[phase] / row[f"time/{phase}"]
            for phase, key in keys.items()
            if work[phase] and row.get(f"time/{phase}", 0) > 0
        }

    def close(self) -> None:
        """Stop sampling."""
        self._sampler.close()

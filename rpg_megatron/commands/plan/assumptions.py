"""Assumptions of the time estimates: speeds of the GPU and its links, efficiencies; each can be set."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rpg_megatron.config import UserError

Source = Literal["data sheet", "measured", "assumed", "as set"]


def _speed(why: str) -> Any:
    return field(metadata={"source": "data sheet", "why": why, "most": math.inf})


def _guess(default: float, why: str, *, most: float = math.inf, source: Source = "assumed") -> Any:
    return field(default=default, metadata={"source": source, "why": why, "most": most})


@dataclass(frozen=True)
class Assumptions:
    """Numbers from which the time of a step is computed. Speeds are for one GPU, links in one direction."""

    peak_bf16: float = _speed("FLOP/s in bfloat16, dense")
    peak_fp8: float = _speed("FLOP/s in FP8, dense")
    peak_fp32: float = _speed("FLOP/s in float32, without TF32")
    memory_bandwidth: float = _speed("bytes/s of the GPU's memory")
    nvlink: float = _speed("bytes/s to a GPU of the same node")
    host_link: float = _speed("bytes/s between GPU and host memory")
    network: float = _guess(50e9, "bytes/s to other nodes: 400 Gb/s for each GPU")
    gloo: float = _guess(0.98e9, "bytes/s of a sync over gloo, with 2 CPU cores", source="measured")
    link_efficiency: float = _guess(0.7, "fraction of nvlink, network and host_link", most=1)
    train_mfu: float = _guess(0.35, "fraction of the peak: forward and backward passes", most=1)
    score_mfu: float = _guess(0.40, "fraction of the peak: log-prob passes", most=1)
    prefill_mfu: float = _guess(0.40, "fraction of the peak: prefill", most=1)
    decode_efficiency: float = _guess(0.6, "fraction of memory_bandwidth: decoding", most=1)
    decode_overhead: float = _guess(0.004, "s per decoding step: scheduler, kernel launches")
    allreduce_latency: float = _guess(15e-6, "s; two per layer if engine.tensor > 1")
    response_mean: float = _guess(0.4, "mean response / rollout.max_response_tokens", most=1)
    prompt_mean: float = _guess(0.25, "mean prompt / data.max_prompt_tokens", most=1)
    length_spread: float = _guess(0.7, "standard deviation of response lengths / mean")
    kept_groups: float = _guess(0.6, "fraction of groups kept by rollout.dynamic", most=1)
    update_overhead: float = _guess(0.2, "s per update")
    step_overhead: float = _guess(2.0, "s per step: last grading, batch to the ranks, metrics")
    sync_overhead: float = _guess(1.0, "s per sync: pause, checksums, calls")
    handover_overhead: float = _guess(2.0, "s per handover of a shared GPU")
    trainer_share: float = _guess(
        0.5, "fraction of GPUs for the trainer, if colocated GPUs were separate", most=1
    )


_NVLINK4 = {"nvlink": 450e9, "host_link": 64e9}
_AMPERE = {"peak_bf16": 312e12, "peak_fp8": 312e12, "peak_fp32": 19.5e12, "nvlink": 300e9, "host_link": 32e9}
_HOPPER = {"peak_bf16": 989e12, "peak_fp8": 1979e12, "peak_fp32": 67e12, **_NVLINK4}
_SPEEDS: dict[str, dict[str, float]] = {
    "a100-40": {**_AMPERE, "memory_bandwidth": 1.555e12},
    "a100-80": {**_AMPERE, "memory_bandwidth": 2.039e12},
    "l40s-48": {
        "peak_bf16": 362e12,
        "peak_fp8": 733e12,
        "peak_fp32": 91.6e12,
        "memory_bandwidth": 0.864e12,
        "nvlink": 32e9,  # none: PCIe
        "host_link": 32e9,
    },
    "h100-80": {**_HOPPER, "memory_bandwidth": 3.35e12},
    "h100-94": {
        "peak_bf16": 835e12,
        "peak_fp8": 1671e12,
        "peak_fp32": 60e12,
        "memory_bandwidth": 3.9e12,
        "nvlink": 300e9,
        "host_link": 64e9,
    },
    "h200-141": {**_HOPPER, "memory_bandwidth": 4.8e12},
    "b200-180": {
        "peak_bf16": 2250e12,
        "peak_fp8": 4500e12,
        "peak_fp32": 75e12,
        "memory_bandwidth": 8e12,
        "nvlink": 900e9,
        "host_link": 64e9,
    },
}
"""GPU -> speeds from NVIDIA's data sheets: dense, NVLink and PCIe in one direction. h100-94: H100 NVL."""

OTHER = "h100-80"
"""GPU whose speeds are assumed if only a memory size is given."""


@dataclass(frozen=True)
class Assumed:
    """The assumptions of a plan and the source of each."""

    values: Assumptions
    sources: Mapping[str, Source]

    @property
    def rows(self) -> list[tuple[str, float, Source, str]]:
        """(name, value, source, meaning) of each assumption."""
        return [
            (f.name, getattr(self.values, f.name), self.sources[f.name], f.metadata["why"])
            for f in fields(Assumptions)
        ]


def assume(gpu: str, options: Sequence[str] = ()) -> Assumed:
    """The assumptions for a GPU (a name in ``gpus.GPUS`` or a size), with those set by the user.

    options: ``name=value`` each. Raises UserError for an unknown name or an impossible value.
    """
    known = {f.name: f for f in fields(Assumptions)}
    speeds = _SPEEDS.get(gpu.strip().lower())
    sources: dict[str, Source] = {name: f.metadata["source"] for name, f in known.items()}
    if speeds is None:
        speeds = _SPEEDS[OTHER]
        sources |= dict.fromkeys(speeds, "assumed")
    given: dict[str, float] = {}
    for option in options:
        name, _, text = option.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"--assume: {name!r} is not an assumption; {hint}")
        most = known[name].metadata["most"]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least_ok = value >= 0 if name.endswith(("_overhead", "_spread", "_latency")) else value > 0
        if not (least_ok and value <= most and value < math.inf):
            range_ = f"of at most {most:g}" if most < math.inf else "such as 0.5 or 3e12"
            raise UserError(f"--assume {name}: needs a positive number {range_}, has {text!r}")
        given[name] = value
    return Assumed(replace(Assumptions(**speeds), **given), {**sources, **dict.fromkeys(given, "as set")})

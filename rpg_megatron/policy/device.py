"""Prepares a process to run Megatron-Core on its device, GPU or CPU, and joins the process group.

Megatron-Core 0.19 calls CUDA in many places. On a machine without a GPU, these entry points are redirected to
the CPU, once, before anything of Megatron is built. On a GPU nothing is changed. Only this module contains
such redirections.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.config import UserError
from rpg_megatron.config.cluster import RENDEZVOUS_VARIABLE
from rpg_megatron.system.collectives import TIMEOUT, control_group, host_backend, share_gloo_devices

NCCL_TIMEOUT = timedelta(hours=1)
"""Ranks wait for rollouts and checkpoints in the control group, so in NCCL they wait for each other only."""


class _Redirect(torch.overrides.TorchFunctionMode):
    """Sends ``device="cuda"``, ``.cuda()`` and pinned memory to plain CPU memory.

    ``Tensor.type()`` returns CUDA names, because Megatron's optimizer compares with those strings.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _leave_uncompiled(function: Any = None, **options: Any) -> Any:
    """Replaces ``torch.compile``, which Megatron calls for fused kernels when it is imported.

    No such kernel runs on a CPU, and the compiler takes a third of the time that a rank imports.
    """
    return (lambda decorated: decorated) if function is None else function


class _NoStream:
    """Replaces CUDA streams on a CPU, where work is synchronous; also the event that it records."""

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass


def start_device(device: str) -> torch.device:
    """Prepare this process for ``device`` ("cpu" or "cuda") and return its torch device. Call once, first.

    Raises UserError if "cuda" is requested and torch sees no GPU, or "cpu" on a machine with a GPU.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device: cuda, but torch sees no GPU on this machine; use device=cpu")
        index = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(index)
        bind_to_numa_node(index)
        return torch.device("cuda", index)
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_stream = lambda device=None: _NoStream()  # type: ignore[assignment,return-value]
        torch.compile = _leave_uncompiled  # type: ignore[assignment]
        if "torch._dynamo" in sys.modules:  # Megatron may have been imported before
            torch._dynamo.config.disable = True
        _Redirect().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        import megatron.core.tensor_parallel.random as megatron_random
        import megatron.core.transformer.moe.token_dispatcher as megatron_dispatcher

        # Activation recompute saves this state; Megatron saves the CPU generator's state as well.
        megatron_random._get_cuda_rng_state = lambda *a, **k: torch.empty(0)
        megatron_random._set_cuda_rng_state = lambda *a, **k: None
        # Experts: the dispatcher copies the token counts to the host on a separate stream, and converts them
        # to lists, which gloo needs, only if it has copied them.
        torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,return-value]
        megatron_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()
        megatron_dispatcher.maybe_move_tensor_to_cpu = _to_host
        return cpu
    raise UserError(
        "device: cpu on a machine with a GPU is not supported; use device=cuda, or hide the GPU from the job"
    )


def bind_to_numa_node(gpu: int, devices: Path = Path("/sys")) -> frozenset[int] | None:
    """Bind this thread, and the threads and memory that it will make, to a GPU's NUMA node.

    devices: the root of sysfs. Returns the cores, or None where nothing was changed: the node is unknown, or
    the job has none of its cores.
    """
    gpu_info: Any = torch.cuda.get_device_properties(gpu)
    try:
        address = f"{gpu_info.pci_domain_id:04x}:{gpu_info.pci_bus_id:02x}:{gpu_info.pci_device_id:02x}.0"
        node = int((devices / "bus" / "pci" / "devices" / address / "numa_node").read_text(encoding="ascii"))
        nodes = devices / "devices" / "system" / "node"
        listed = (nodes / f"node{node}" / "cpulist").read_text(encoding="ascii").strip()
        ranges = [part.partition("-") for part in listed.split(",")]
        cores = {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}
    except (AttributeError, OSError, ValueError):  # an older torch; hidden by a virtual machine; -1: no node
        return None
    allowed = frozenset(cores & os.sched_getaffinity(0))
    if not allowed:
        return None
    os.sched_setaffinity(0, allowed)
    return allowed


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces ``maybe_move_tensor_to_cpu``: as for a tensor on a GPU. ``tensor`` may be None."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def start_process_group(device: torch.device) -> None:
    """Join the job's process group (environment: RANK, WORLD_SIZE, and the rendezvous).

    The rendezvous is a file in a private folder on one node (RPG_RENDEZVOUS), and a TCP port on several nodes
    (MASTER_ADDR, MASTER_PORT). Torch's TCP store has no authentication: any user who can reach the port can
    read and change the messages between ranks.

    Also creates the control group, for objects and barriers (``system.collectives``). A rank alone on a CPU
    opens no socket. The device is not bound to the group: torch would then create a communicator for each of
    Megatron's groups at once, used or not.
    Raises UserError on rank 0 if it cannot listen at that address and port.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else host_backend(world)
    if world > 1:
        share_gloo_devices()
    store = _open_store(rank)
    timeout = NCCL_TIMEOUT if backend == "nccl" else TIMEOUT
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    control_group()


def _open_store(rank: int) -> dist.Store:
    if (file := os.environ.get(RENDEZVOUS_VARIABLE)) is not None:
        return dist.FileStore(file)  # removed with its folder, not by the last rank
    # Torch's own rendezvous would listen on every network interface.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        try:
            listener = socket.create_server((address, port), backlog=4096)
        except OSError as e:
            raise UserError(
                f"trainer rank 0 cannot listen at {address}:{port} ({e.strerror or e}); start again: another "
                "process has taken this free port"
            ) from None
        return dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return dist.TCPStore(address, port, None, False, timeout=timedelta(minutes=10))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: on a GPU as torch allocated, on a CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

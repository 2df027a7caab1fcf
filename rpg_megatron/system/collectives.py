"""CPU collectives between ranks over gloo: broadcast and gather objects, sum arrays, barrier, fail together.

They use a gloo group (the control group) and no GPU. In an NCCL collective, a waiting rank runs a kernel on
its GPU, which engines may share, and objects take GPU memory. Only the main thread of a rank uses the control
group; other threads have groups of their own. A rank alone needs no gloo.

Objects travel as msgpack, not as torch's pickles: gloo has no authentication, and to read a pickle is to run
it. ``kind`` is the type of the object, as for ``encoding.decode``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.system.single_rank_group import SINGLE_RANK

TIMEOUT = timedelta(hours=12)
"""Long, because ranks wait while rank 0 waits for rollouts; the launcher detects dead ranks."""
_LARGEST = 1 << 32
"""Maximum bytes of an object."""

_control: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""The default process group -> the control group over its ranks; one entry at most."""


def host_backend(world: int) -> str:
    """Torch's backend for collectives on the host in a world of ``world`` ranks."""
    return "gloo" if world > 1 else SINGLE_RANK


def share_gloo_devices() -> None:
    """Let all gloo groups that this process creates from now on use the same devices, one for each interface.

    Each device has a port and a thread that wakes up 100 times per second. Torch creates devices for every
    group; Megatron creates dozens of groups, vLLM 13: 60 groups take a tenth of a core per process when idle.
    ``new_group`` passes no options to the class, so its constructor is replaced.
    """
    gloo: Any = dist.ProcessGroupGloo
    plain = gloo.__init__
    if getattr(plain, "__module__", None) == __name__:
        return

    def init(self: Any, store: dist.Store, rank: int, size: int, *args: Any, **timeout: Any) -> None:
        if not args and timeout:
            options = gloo._Options()
            options._devices = _gloo_devices(os.getpid())
            options._threads = 2 * len(options._devices)
            options._timeout = timeout["timeout"]
            args, timeout = (options,), {}
        plain(self, store, rank, size, *args, **timeout)

    gloo.__init__ = init


@cache
def _gloo_devices(pid: int) -> list[Any]:
    """The devices that torch would create. pid: this process's; a fork does not copy their threads."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def new_host_group() -> dist.ProcessGroup:
    """A group over all ranks for collectives on the host, for one thread of each. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend=host_backend(dist.get_world_size()), timeout=TIMEOUT)
    return group


def control_group() -> dist.ProcessGroup:
    """The host group over all ranks for the main threads. The first call is collective."""
    default = dist.group.WORLD
    assert default is not None, "no process group is initialised"
    if default in _control.values():  # within ``default_group_on_host``
        return default
    if default not in _control:
        _control.clear()
        _control[default] = new_host_group()
    return _control[default]


def gather_objects(value: Any, kind: Any = Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank; ``[value]`` without an initialised process group.

    Meant for a few kilobytes. group: of all ranks; None: the control group.
    """
    if not dist.is_initialized():
        return [value]
    return _decode_all(_gather(encode(value), group or control_group(), to_all=True), kind)


def gather_on_first(value: Any, kind: Any = Any) -> list[Any]:
    """Every rank's value, in rank order, on rank 0; elsewhere an empty list."""
    return _decode_all(_gather(encode(value), control_group(), to_all=False), kind)


def broadcast_object(value: Any, kind: Any = Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on every rank; the others wait for it. group: as for ``gather_objects``."""
    sent = encode(value) if dist.get_rank() == 0 else None
    return _decode_all([_broadcast(sent, group or control_group())], kind)[0]


def _gather(data: bytes, group: dist.ProcessGroup, *, to_all: bool) -> list[memoryview]:
    """The bytes of every rank, on every rank or only on rank 0."""
    counts = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather(list(counts), torch.tensor([len(data)]), group=group)
    for rank, count in enumerate(counts.flatten().tolist()):
        _check_size(rank, count)
    padded = torch.zeros(int(counts.max()), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = padded.new_empty(len(counts) if to_all or dist.get_rank() == 0 else 0, len(padded))
    if to_all:
        dist.all_gather(list(rows), padded, group=group)
    else:
        dist.gather(padded, list(rows) or None, dst=0, group=group)
    return [memoryview(row[: int(count)].numpy()) for row, count in zip(rows, counts, strict=False)]


def _broadcast(data: bytes | None, group: dist.ProcessGroup) -> memoryview:
    """The bytes of rank 0, which alone passes them."""
    count = torch.tensor([len(data or b"")])
    dist.broadcast(count, 0, group=group)
    _check_size(0, int(count))
    sent = torch.empty(int(count), dtype=torch.uint8)
    if data is not None:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(sent, 0, group=group)
    return memoryview(sent.numpy())


def _check_size(rank: int, count: int) -> None:
    """Raise RuntimeError for a number of bytes that no rank sends, before memory is reserved."""
    if not 0 <= count <= _LARGEST:
        raise RuntimeError(f"rank {rank} announces an object of {count} bytes, not 0 to {_LARGEST}")


def _decode_all(received: Sequence[memoryview], kind: Any) -> list[Any]:
    values = []
    for rank, data in enumerate(received):
        try:
            values.append(decode(data, kind))
        except msgspec.DecodeError as e:
            raise RuntimeError(f"what rank {rank} sent to the other ranks cannot be read: {e}") from None
    return values


def sum_arrays(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The element-wise sum of all ranks' arrays, float64 of one shape, on every rank; may overwrite
    ``values``.

    Returns ``values`` without an initialised process group.
    """
    if not dist.is_initialized():
        return values
    total = torch.from_numpy(values)
    dist.all_reduce(total, group=control_group())
    return total.numpy()


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(group=control_group())


@contextmanager
def default_group_on_host() -> Iterator[None]:
    """Make the control group torch's default process group within the block.

    For object collectives of Megatron and torch that use the default group, such as those that plan a
    checkpoint. Not for GPU tensors. Does nothing without an initialised process group.
    """
    if not dist.is_initialized():
        yield
        return
    control, default = control_group(), dist.group.WORLD
    replace_default = dist.distributed_c10d._update_default_pg
    replace_default(control)
    try:
        yield
    finally:
        replace_default(default)


def run_together[T](step: Callable[[], T]) -> T:
    """Run ``step`` on each rank; if it fails on any rank, raise on all ranks instead of hanging.

    The failing rank raises its own exception; the others raise a UserError (if all failures are UserError or
    OSError) or a RuntimeError with rank and message.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as e:
        error = e
    failure = None if error is None else (isinstance(error, UserError | OSError), f"{error}" or repr(error))
    failures = gather_objects(failure, tuple[bool, str] | None)
    failed = [(r, p) for r, p in enumerate(failures) if p is not None]
    if error is not None:
        raise error
    if failed:
        message = "; ".join(f"rank {r}: {p[1]}" for r, p in failed)
        raise (UserError if all(p[0] for _, p in failed) else RuntimeError)(message)
    return result  # type: ignore[return-value]

"""CPU collectives between ranks over gloo: broadcast and gather objects, sum arrays, barrier, fail together.

They use a gloo group (the control group) and no GPU. In an NCCL collective, a waiting rank runs a kernel on
its GPU, which engines may share, and objects take GPU memory. Only the main thread of a rank uses the control
group; other threads have groups of their own. A rank alone needs no gloo.

Objects travel as msgpack, not as torch's pickles: gloo has no authentication, and to read a pickle is to run
it. ``kind`` is the type of the object, as for ``encoding.decode``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import FakeProcessGroup

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.encoding import decode, encode

SINGLE_RANK = "single_rank"
"""Backend for a rank alone. Gloo would listen on a port for each group, which any user can connect to."""
TIMEOUT = timedelta(hours=12)
"""Long, because ranks wait while rank 0 waits for rollouts; the launcher detects dead ranks."""
_LARGEST = 1 << 32
"""Maximum bytes of an object."""
_LARGEST_MESH = 32
"""Ranks of a gloo group that are all connected with each other when it is created."""
_HEADER = 8
"""Bytes before an object that is gathered: its size."""
_TAG = 1
"""Of messages between two ranks that are part of a collective of this module."""

_control: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""The default process group -> the control group over its ranks; one entry at most."""


def host_backend(world: int) -> str:
    """Torch's backend for collectives on the host in a world of ``world`` ranks."""
    return "gloo" if world > 1 else SINGLE_RANK


def _single_rank_group(_store: Any, rank: int, size: int, _timeout: Any) -> FakeProcessGroup:
    """Torch's group without a network: each output is a copy of the input."""
    if (rank, size) != (0, 1):
        raise ValueError(f"rank {rank} of {size}: the backend {SINGLE_RANK} is for one rank")
    return FakeProcessGroup._create_internal(rank, size)


dist.Backend.register_backend(SINGLE_RANK, _single_rank_group, devices=["cpu", "cuda"])


def bind_stores() -> None:
    """Let torch's own rendezvous by TCP listen at its address only, not on every network interface."""
    module: Any = sys.modules["torch.distributed.rendezvous"]

    def store(**options: Any) -> dist.TCPStore:
        if options["is_master"]:
            listener = socket.create_server((options["host_name"], options["port"]), backlog=4096)
            options["master_listen_fd"] = listener.detach()
        return dist.TCPStore(**options)

    module.TCPStore = store


def share_gloo_devices() -> None:
    """Let all gloo groups that this process creates from now on use the same devices, one for each interface.

    Each device has a port and a thread that wakes up 100 times per second. Torch creates devices for every
    group; Megatron creates dozens of groups, vLLM 13: 60 groups take a tenth of a core per process when idle.
    ``new_group`` passes no options to the class, so its constructor is replaced.

    Gloo connects every rank of a group with every other one, which takes a process group time that grows with
    the square of the ranks. Groups of more than 32 ranks connect two ranks when they first exchange something
    (lazily), by a device of their own: gloo numbers the connections of such a device by rank, and shuts the
    device down with the group.
    """
    gloo: Any = dist.ProcessGroupGloo
    plain = gloo.__init__
    if getattr(plain, "__module__", None) == __name__:
        return

    def init(self: Any, store: dist.Store, rank: int, size: int, *args: Any, **timeout: Any) -> None:
        if not args and timeout:
            options = gloo._Options()
            lazy = size > _LARGEST_MESH
            options._devices = _make_devices(lazy=True) if lazy else _shared_devices(os.getpid())
            options._threads = 2 * len(options._devices)
            options._timeout = timeout["timeout"]
            args, timeout = (options,), {}
        plain(self, store, rank, size, *args, **timeout)

    gloo.__init__ = init


@cache
def _shared_devices(pid: int) -> list[Any]:
    """Devices for many groups. pid: this process's; a fork does not copy their threads."""
    return _make_devices(lazy=False)


def _make_devices(*, lazy: bool) -> list[Any]:
    """The devices that torch would create."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name, lazy_init=lazy) for name in names]
    return devices or [gloo.create_default_device(lazy_init=lazy)]


def new_host_group() -> dist.ProcessGroup:
    """A group over all ranks for collectives on the host, for one thread of each. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend=host_backend(dist.get_world_size()), timeout=TIMEOUT)
    dist.barrier(group=group)  # connects what most collectives need while all ranks are there
    return group


def new_host_subgroup(parts: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of those over ``parts`` of the ranks, in which each rank is once. Collective."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(parts, timeout=TIMEOUT, backend="gloo")
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


def gather_objects(
    value: Any, kind: Any = Any, group: dist.ProcessGroup | None = None, *, to_all: bool = True
) -> list[Any]:
    """Every rank's value, in rank order, on every rank; ``[value]`` without an initialised process group.

    Meant for a few kilobytes, and not for every step of a run: each rank gets, and decodes, what all others
    send. group: None: the control group. to_all: otherwise only rank 0 gets them, the others an empty list.
    """
    if not dist.is_initialized():
        return [value]
    return _decode_all(_gather(encode(value), group or control_group(), to_all=to_all), kind)


gather_on_first = partial(gather_objects, to_all=False)


def broadcast_object(
    value: Any, kind: Any = Any, group: dist.ProcessGroup | None = None, *, largest: int = _LARGEST
) -> Any:
    """The value of the group's first rank, on every rank; the others wait for it.

    group: as for ``gather_objects``. largest: maximum bytes of the encoded value.
    """
    group = group or control_group()
    sent = encode(value) if dist.get_rank(group) == 0 else None
    return _decode_all([_broadcast(sent, group, largest)], kind)[0]


def _gather(data: bytes, group: dist.ProcessGroup, *, to_all: bool) -> list[memoryview]:
    """The bytes of every rank, on every rank or only on rank 0."""
    longest = max_over_ranks(len(data), group)
    _check_size("a rank", longest, _LARGEST)
    message = (len(data).to_bytes(_HEADER, "little") + data).ljust(_HEADER + longest, b"\0")
    padded = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    count = dist.get_world_size(group) if to_all or dist.get_rank(group) == 0 else 0
    rows = padded.new_empty(count, len(padded))
    if to_all:
        dist.all_gather(list(rows), padded, group=group)
    else:
        dist.gather(padded, list(rows) or None, group=group, group_dst=0)
    return [_unpad(rank, row, longest) for rank, row in enumerate(rows)]


def _unpad(rank: int, row: torch.Tensor, longest: int) -> memoryview:
    data = memoryview(row.numpy())
    size = int.from_bytes(data[:_HEADER], "little")
    _check_size(f"rank {rank}", size, longest)
    return data[_HEADER : _HEADER + size]


def _broadcast(data: bytes | None, group: dist.ProcessGroup, largest: int) -> memoryview:
    """The bytes of the group's first rank, which alone passes them."""
    count = torch.tensor([len(data or b"")])
    dist.broadcast(count, group=group, group_src=0)
    _check_size("rank 0", int(count), largest)
    sent = torch.empty(int(count), dtype=torch.uint8)
    if data is not None:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(sent, group=group, group_src=0)
    return memoryview(sent.numpy())


def _check_size(sender: str, count: int, largest: int) -> None:
    """Raise RuntimeError for a number of bytes that no rank sends, before memory is reserved."""
    if not 0 <= count <= largest:
        raise RuntimeError(f"{sender} announces an object of {count} bytes, not 0 to {largest}")


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


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank, on every rank; ``flag`` without an initialised process group."""
    return bool(max_over_ranks(int(flag)))


def max_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The largest of all ranks' values, on every rank; ``value`` without an initialised process group.

    No rank returns before all have called it. group: as for ``gather_objects``. Takes log2(ranks) rounds, as
    gloo's barrier: its all_reduce passes a single number from rank to rank, twice round all of them.
    """
    if not dist.is_initialized():
        return value
    group = group or control_group()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    held, received = torch.tensor([value]), torch.zeros(1, dtype=torch.int64)
    distance = 1
    while distance < world:
        to, source = (rank + distance) % world, (rank - distance) % world
        sending = dist.isend(held, group=group, group_dst=to, tag=_TAG)
        dist.recv(received, group=group, group_src=source, tag=_TAG)
        if sending is not None:
            sending.wait()
        held = torch.maximum(held, received)
        distance *= 2
    return int(held)


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
    try:
        result = step()
    except Exception as e:
        error = e
    if not any_rank(error is not None):
        return result
    failure = error and (isinstance(error, UserError | OSError), f"{error}" or repr(error))
    failures = gather_objects(failure, tuple[bool, str] | None)
    if error is not None:
        raise error
    failed = [(rank, *each) for rank, each in enumerate(failures) if each is not None]
    message = "; ".join(f"rank {rank}: {text}" for rank, _, text in failed)
    raise (UserError if all(is_users for _, is_users, _ in failed) else RuntimeError)(message)

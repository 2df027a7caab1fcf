"""CPU collectives between ranks over gloo: broadcast and gather objects, sum arrays, barrier, fail together.

They use a gloo group (the control group) and no GPU. In an NCCL collective, a waiting rank runs a kernel on
its GPU, which engines may share, and objects take GPU memory. Only the main thread of a rank uses the control
group; other threads have groups of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.config.errors import UserError

TIMEOUT = timedelta(hours=12)
"""Long, because ranks wait while rank 0 waits for rollouts; the launcher detects dead ranks."""

_control: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""The default process group -> the control group over its ranks; one entry at most."""


def new_gloo_group() -> dist.ProcessGroup:
    """A gloo group over all ranks, for one thread of each. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return group


def control_group() -> dist.ProcessGroup:
    """The gloo group over all ranks for the main threads. The first call is collective."""
    default = dist.group.WORLD
    assert default is not None, "no process group is initialised"
    if default in _control.values():  # within ``default_group_on_host``
        return default
    if default not in _control:
        _control.clear()
        _control[default] = new_gloo_group()
    return _control[default]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; ``[value]`` without an initialised process group.

    The values are pickled; meant for a few kilobytes.
    """
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=control_group())
    return out


def gather_on_first(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on rank 0; elsewhere an empty list."""
    out: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, out, dst=0, group=control_group())
    return out or []


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank; the others wait for it."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=control_group())
    return box[0]


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
    failed = [(r, p) for r, p in enumerate(gather_objects(failure)) if p is not None]
    if error is not None:
        raise error
    if failed:
        message = "; ".join(f"rank {r}: {p[1]}" for r, p in failed)
        raise (UserError if all(p[0] for _, p in failed) else RuntimeError)(message)
    return result  # type: ignore[return-value]

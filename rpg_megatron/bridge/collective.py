"""Small agreements between ranks: tell everyone, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rpg_megatron.config.errors import UserError


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; ``[value]`` without an initialised process group.

    Meant for a few kilobytes: it goes through pickle.
    """
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def run_together[T](step: Callable[[], T]) -> T:
    """Run each rank's share of a step; if it fails on any rank, raise on all of them instead of hanging.

    The failing rank raises its own exception; the others a UserError or RuntimeError that names it.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as e:
        error = e
    told = None if error is None else (isinstance(error, UserError | OSError), f"{error}" or repr(error))
    failed = [(r, p) for r, p in enumerate(gather_objects(told)) if p is not None]
    if error is not None:
        raise error
    if failed:
        message = "; ".join(f"rank {r}: {p[1]}" for r, p in failed)
        raise (UserError if all(p[0] for _, p in failed) else RuntimeError)(message)
    return result  # type: ignore[return-value]

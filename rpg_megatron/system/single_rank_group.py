"""A process group of one rank that opens no socket, as a backend of ``torch.distributed``.

Gloo listens on a TCP port for each of its groups, also for a group of one rank that nobody joins, and any
user of the node can connect to that port. Importing this module registers the backend ``SINGLE_RANK``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

SINGLE_RANK = "single_rank"
"""Name of the backend."""


class _Done(dist.Work):
    """A collective that was complete when its call returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_ProcessGroup: Any = dist.ProcessGroup  # torch's stub declares overloads that torch does not call


class _SingleRankGroup(_ProcessGroup):  # type: ignore[misc]
    """Each output is a copy of the input, made on the current stream.

    The functions of ``torch.distributed`` call these methods. Torch's own class raises for what is not
    defined here, such as messages to other ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        if (rank, size) != (0, 1):
            raise ValueError(f"rank {rank} of {size}: the backend {SINGLE_RANK} is for one rank")
        super().__init__(rank, size)

    # Torch's own class keeps the name in backends of its own.
    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:
        return SINGLE_RANK

    def shutdown(self) -> None:
        pass

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _copy(tensors, tensors, opts)

    allreduce_coalesced = reduce = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _copy([tensor for (tensor,) in outputs], inputs)

    gather = allgather_coalesced = allgather

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        return _copy(outputs, [tensor for (tensor,) in inputs], opts)

    scatter = reduce_scatter

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _copy(outputs, inputs, opts)

    all_gather_single_coalesced = reduce_scatter_single_coalesced = alltoall

    def all_to_all_single(self, output: Tensor, source: Tensor, *_: Any) -> dist.Work:
        return _copy([output], [source])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        return _copy([output], [source], opts)

    reduce_scatter_single = all_gather_single


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
    """Copy inputs to outputs of as many elements, unless they are the same memory."""
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError(f"{SINGLE_RANK}: a reduction that scales its input")
    for output, source in zip(outputs, inputs, strict=True):
        values = source.detach().reshape(output.shape)
        if values.data_ptr() != output.data_ptr():
            output.detach().copy_(values)
    return _Done()


dist.Backend.register_backend(
    SINGLE_RANK, lambda _, rank, size, __: _SingleRankGroup(rank, size), devices=["cpu", "cuda"]
)

"""The process group of a single rank does what gloo does for one rank, without gloo's port.

Why: gloo opens an unauthenticated loopback port for each of Megatron's process groups, also for one rank.
Proved: each collective that Megatron and torch call leaves the same bytes in the same tensors as gloo, and no
port is open. Not covered: GPUs, and a whole rank (tests/distributed/test_control_group).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.system.collectives import SINGLE_RANK
from tests.support.sockets import listening_ports

ODD = torch.tensor([[1.5, -0.0], [torch.nan, torch.inf]])


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def into(collective: Callable[[Tensor, Tensor], Any]) -> Callable[[], list[Tensor]]:
    """A collective of an output and an input; both are compared."""

    def call() -> list[Tensor]:
        out, source = torch.zeros_like(ODD), ODD.clone()
        collective(out, source)
        return [out, source]

    return call


def coalesced(collective: Callable[[Tensor, Tensor], Any]) -> Callable[[], list[Tensor]]:
    """As Megatron calls it for gradient and parameter buckets: coalesced, with a later wait."""

    def call(out: Tensor, source: Tensor) -> None:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as handle:
            collective(out, source)
        handle.wait()

    return into(call)


def objects() -> list[Any]:
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, {"key": (1, 2)})
    dist.gather_object({"key": (1, 2)}, gathered)
    dist.broadcast_object_list(gathered, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, gathered, src=0)
    return gathered + scattered


def in_place() -> list[Tensor]:
    """Megatron's buffers: the output is a view of the input."""
    buffer = ODD.clone().view(-1)
    dist.reduce_scatter_tensor(buffer[:], buffer)
    dist.all_gather_into_tensor(buffer, buffer[:])
    return [buffer]


REDUCTIONS = {
    f"all_reduce {op}": into(lambda out, source, op=op: dist.all_reduce(source, op=op, async_op=True).wait())
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
}
COLLECTIVES = REDUCTIONS | {
    "reduce": into(lambda out, source: dist.reduce(source, 0)),
    "broadcast": into(lambda out, source: dist.broadcast(source, 0)),
    "all_gather": into(lambda out, source: dist.all_gather([out], source)),
    "all_gather_into_tensor": into(dist.all_gather_into_tensor),
    "gather": into(lambda out, source: dist.gather(source, [out], dst=0)),
    "scatter": into(lambda out, source: dist.scatter(out, [source], src=0)),
    "reduce_scatter": into(lambda out, source: dist.reduce_scatter(out, [source])),
    "reduce_scatter_tensor": into(dist.reduce_scatter_tensor),
    "all_to_all_single": into(dist.all_to_all_single),
    "all_to_all_single, sizes": into(lambda out, source: dist.all_to_all_single(out, source, [2], [2])),
    "coalesced all_reduce": coalesced(lambda out, source: dist.all_reduce(source)),
    "coalesced all_gather": coalesced(dist.all_gather_into_tensor),
    "coalesced reduce_scatter": coalesced(dist.reduce_scatter_tensor),
    "objects": objects,
    "in place": in_place,
}


def outcomes(backend: str) -> tuple[dict[str, list[Any]], list[int]]:
    """The tensors and objects after each collective, and the open ports."""
    with process_group(backend):
        dist.barrier()
        results = {name: call() for name, call in COLLECTIVES.items()}
        dist.barrier(group=dist.new_group([0]))
        return results, listening_ports()


def test_collectives_leave_what_gloo_leaves_without_a_port() -> None:
    before = listening_ports()
    (expected, ports), (results, open_ports) = outcomes("gloo"), outcomes(SINGLE_RANK)
    assert len(ports) > len(before), "gloo's ports are not seen"
    assert open_ports == before
    for name, values in expected.items():
        for value, actual in zip(values, results[name], strict=True):
            if isinstance(value, Tensor):
                value, actual = value.numpy().tobytes(), actual.numpy().tobytes()
            assert actual == value, name


def test_later_changes_stay_apart() -> None:
    with process_group(SINGLE_RANK):
        source, out = torch.ones(2), torch.zeros(2)
        dist.all_gather_into_tensor(out, source)
        out += 1
        assert source.tolist() == [1, 1]
        dist.all_to_all([out], [source])  # which gloo does not have
        assert out.tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="size"):
            dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))


def test_several_ranks_are_an_error() -> None:
    with pytest.raises(ValueError, match="rank 0 of 2: the backend single_rank is for one rank"):
        dist.init_process_group(SINGLE_RANK, store=dist.HashStore(), rank=0, world_size=2)

"""Memory of NCCL's buffers on a GPU, by communicator, in bytes. Not measured.

Sizes are those of NCCL 2.29 on H100 nodes with default settings: ``computeBuffSizes`` (init.cc),
``p2pSendSetup`` and ``p2pRecvSetup`` (transport/p2p.cc), ``sharedNetBuffersInit`` (transport/net.cc) and
``ncclNvlsBufferSetup`` (transport/nvls.cc). Connections are made when they are first used. With cuMem each
allocation takes a multiple of 2 MiB. ``docs/plan.md`` has the numbers and what was published of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rpg_megatron.commands.plan.layout import Gpus, engines_of_a_replica, expert_replicas
from rpg_megatron.config import ModelShape, Settings

_MIB = 1024**2
_BOTH_WAYS = 12
"""MiB of a channel to a peer over NVLink: 10 to receive (LL, LL128 and Simple, a header), 2 to send."""
_OVER_NETWORK = 20
"""The same over the network: 10 in each direction."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks, and what a rank does in it."""

    size: int
    here: int
    """Number of its ranks on this rank's node."""
    collectives: bool = True
    """Used for all-gather, reduce-scatter, broadcast or all-reduce."""
    large_all_reduce: bool = False
    """Used for all-reduces of megabytes: on a whole node and between nodes in the switch (NVLS)."""
    peers: int = 0
    """Ranks that this one sends to and receives from."""

    @property
    def nbytes(self) -> int:
        """Bytes on this rank. Between nodes an upper estimate: trees differ by rank."""
        here, nodes = self.here, self.size > self.here
        channels = min(16, 4 * here) if nodes else 24
        p2p = channels if nodes else 32
        switch = 34 if here > 1 else 0
        mib = 6 * max(channels, p2p) + switch + 4
        if self.collectives:
            # A ring; of a node's ranks one sends to another node.
            mib += channels * (_BOTH_WAYS + (_OVER_NETWORK - _BOTH_WAYS) // here if nodes else _BOTH_WAYS)
            if nodes:  # a tree, with three neighbours at most
                mib += channels * (3 * _OVER_NETWORK // here + (_BOTH_WAYS if here > 1 else 0))
            if self.large_all_reduce and (here > 1 if nodes else here == 8):
                mib += 32 * here + (2 * 16 * _OVER_NETWORK if nodes else 0)
        if self.peers:
            near = min(self.peers, here - 1)
            each = max(1, 4 // -(-self.size // 32)) if nodes else p2p
            mib += _BOTH_WAYS * each * near
            if self.peers > near:  # pools; PXN has those of the other ranks of the node here too
                mib += 2 * p2p * (here + 1)
        return mib * _MIB


def trainer_communicators(
    settings: Settings, shape: ModelShape, stage: int, *, fused: bool, ranks_per_node: int
) -> Iterator[tuple[str, Communicator]]:
    """The communicators of more than one rank that a rank of this pipeline stage uses, with their names.

    fused: whether layers are Transformer Engine's. ``tests/distributed/test_fake_cuda.py`` compares them with
    the groups that a policy sends tensors in.
    """
    parallel, training = settings.parallel, settings.training
    replicas = parallel.data * parallel.context
    of_stage = parallel.tensor * replicas

    def group(size: int, stride: int, **use: Any) -> Communicator:
        here = max(1, min(size, ranks_per_node // stride))
        return Communicator(size, here, **use)

    def neighbours(size: int) -> int:
        return min(2, size - 1)

    world, large = parallel.world, not settings.optimizer.distributed
    yield "all ranks", group(world, 1)
    yield "all ranks: norm of the gradients", group(world, 1)
    yield "data x context", group(replicas, parallel.tensor, large_all_reduce=large)
    yield "tensor", group(parallel.tensor, 1, large_all_reduce=not parallel.sequence)
    ring = neighbours(parallel.context) if fused else 0
    yield "context", group(parallel.context, parallel.tensor, peers=ring)
    yield "pipeline", group(parallel.pipeline, of_stage, peers=neighbours(parallel.pipeline))
    if parallel.pipeline > 1 and stage in (0, parallel.pipeline - 1):
        yield "embeddings", group(2, of_stage, large_all_reduce=True)
    if shape.experts is not None:
        expert, tensor = parallel.expert, parallel.expert_tensor
        yield "experts: all-to-all", group(expert, tensor, collectives=False, peers=expert - 1)
        yield "experts: counts", group(expert * tensor, 1)
        yield "experts: tensor", group(tensor, 1)
        alike = expert_replicas(parallel)
        yield "experts: gradients", group(alike, expert * tensor, large_all_reduce=large)
        if training.router_aux_loss:
            yield "experts: auxiliary loss", group(parallel.tensor * parallel.context, 1)
            yield "experts: load", group(replicas, parallel.tensor)


def trainer_nccl(
    settings: Settings, shape: ModelShape, stage: int, *, fused: bool, ranks_per_node: int
) -> int:
    """Bytes of NCCL on a trainer rank."""
    communicators = trainer_communicators(settings, shape, stage, fused=fused, ranks_per_node=ranks_per_node)
    return sum(communicator.nbytes for _, communicator in communicators if communicator.size > 1)


def engine_nccl(tensor: int) -> int:
    """Bytes of NCCL on a worker of an engine with ``tensor`` workers, which vLLM counts when it starts."""
    return Communicator(tensor, tensor, large_all_reduce=True).nbytes if tensor > 1 else 0


def link_nccl(settings: Settings, gpus: Gpus) -> tuple[int, int]:
    """Bytes of the links (``process_group``) on a trainer rank, and on an engine worker.

    Each pair of a rank and a worker has a communicator, in which the rank only sends.
    """
    parallel, engine = settings.parallel, settings.engine
    if settings.bridge.transport != "process_group" or engine.colocated:  # colocated: gloo
        return 0, 0
    workers = engines_of_a_replica(engine.replicas, parallel) * engine.tensor
    ranks = parallel.tensor * parallel.pipeline
    if len(gpus.nodes) == 1:
        base = Communicator(2, 2, collectives=False).nbytes
        return workers * (base + 32 * 2 * _MIB), ranks * (base + 32 * 10 * _MIB)
    between = Communicator(2, 1, collectives=False, peers=1).nbytes
    return workers * between, ranks * between

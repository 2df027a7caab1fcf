"""Memory of a GPU that a trainer rank and an engine worker use in turns (``engine.colocated``).

Computed from the parts of both; not compared with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.engine_memory import GRAPHS, EngineMemory
from rpg_megatron.commands.plan.gpu_count import GPUS_PER_NODE
from rpg_megatron.commands.plan.trainer_memory import RESERVE, SERVED, Basis, RankMemory
from rpg_megatron.config import Settings

Turn = Literal["rollout", "update"]

CONTEXT = 512 * 1024**2
"""CUDA context of a process on another GPU that reads this GPU's memory by CUDA IPC; not measured, a rule of
thumb.
"""


@dataclass(frozen=True)
class Share:
    """A part of the GPU's memory in a turn."""

    name: str
    nbytes: int
    basis: Basis
    turn: Turn


@dataclass(frozen=True)
class SharedGpu:
    """The GPU of the largest trainer rank, and an engine worker."""

    shares: tuple[Share, ...]

    def total(self, turn: Turn) -> int:
        """Peak bytes of a turn."""
        return sum(share.nbytes for share in self.shares if share.turn == turn)

    @property
    def peak(self) -> int:
        """Peak bytes of both turns."""
        return max(self.total("rollout"), self.total("update"))


def share_gpu(settings: Settings, rank: RankMemory, engine: EngineMemory) -> SharedGpu:
    """The memory of a GPU with both processes.

    While engines sample, the rank keeps its weights; gradients are freed, and the optimizer state is in host
    memory. While the rank computes (log-probs, updates, checkpoints), the engine keeps only its context and
    graphs. Starting needs no more: the engines start alone, and the ranks when the engines sleep.
    """
    kept = sum(part.nbytes for part in rank.parts if part.name in ("parameters", SERVED))
    # Over CUDA IPC, a worker reads all ranks of the replica that its own GPU belongs to.
    replica = settings.parallel.tensor * settings.parallel.pipeline
    # They are on the same node.
    workers = min(settings.engine.replicas * settings.engine.tensor, replica, GPUS_PER_NODE)
    readers = CONTEXT * (workers - 1) if settings.bridge.transport == "cuda_ipc" else 0
    shares = []
    own: tuple[tuple[Turn, list[tuple[str, int, Basis]]], ...] = (
        (
            "rollout",
            [
                ("engine: weights", engine.weights, "exact"),
                ("engine: KV cache", engine.kv_cache, "exact"),
                ("engine: largest batch, context, graphs", engine.running, "estimated"),
                ("rank: parameters", kept, "exact"),
            ],
        ),
        (
            "update",
            [
                ("rank: peak", rank.peak, "estimated"),
                ("engine asleep: context, graphs", GRAPHS, "estimated"),
            ],
        ),
    )
    for turn, parts in own:
        parts.append(("rank: CUDA context, NCCL, reserve", RESERVE, "estimated"))
        if readers:
            parts.append(("contexts of engines that read here", readers, "estimated"))
        shares += [Share(name, nbytes, basis, turn) for name, nbytes, basis in parts]
    return SharedGpu(tuple(shares))

"""Bytes on a card that a trainer rank and an engine worker share by turns (``engine.colocated``).

Arithmetic on the parts of both; no turn has been measured against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.engine_memory import GRAPHS, EngineMemory
from rpg_megatron.commands.plan.trainer_memory import RESERVE, SERVED, Basis, RankMemory
from rpg_megatron.config import Settings

Turn = Literal["rollout", "update"]

CONTEXT = 512 * 1024**2
"""CUDA context of a process that reads this card's memory by CUDA IPC and computes on another; not measured,
a rule of thumb.
"""
_NODE = 8
"""Cards of a node: a card is read by engines of its own node alone."""


@dataclass(frozen=True)
class Share:
    """What one of the two processes, or both, hold of the card in a turn."""

    name: str
    nbytes: int
    basis: Basis
    turn: Turn


@dataclass(frozen=True)
class SharedCard:
    """The card with the largest trainer rank, and an engine worker."""

    shares: tuple[Share, ...]

    def total(self, turn: Turn) -> int:
        """Bytes at the worst moment of a turn."""
        return sum(share.nbytes for share in self.shares if share.turn == turn)

    @property
    def peak(self) -> int:
        """Most bytes at a time."""
        return max(self.total("rollout"), self.total("update"))


def share_card(settings: Settings, rank: RankMemory, engine: EngineMemory) -> SharedCard:
    """Put both on one card.

    While engines sample the rank keeps its weights: gradients are let go, the optimizer's state is in host
    memory. While it computes (log-probs, updates, checkpoints) the engine's weights and KV cache are gone,
    its context and graphs stay. Neither takes more while it starts: the engines have the cards for themselves
    then, and the ranks build when those sleep.
    """
    kept = sum(part.nbytes for part in rank.parts if part.name in ("parameters", SERVED))
    # Over CUDA IPC a worker reads the replica on its own card, which lies on these cards.
    replica = settings.parallel.tensor * settings.parallel.pipeline
    workers = min(settings.engine.replicas * settings.engine.tensor, replica, _NODE)
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
    return SharedCard(tuple(shares))

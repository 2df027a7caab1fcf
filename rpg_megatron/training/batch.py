"""A step's trajectories on one rank, and what is known of the whole step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.policy import Accumulated
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.training.batch_scatter import ReplicaBatch


class ProbeBatch(NamedTuple):
    """Responses that only the guard on mismatch compares."""

    minibatches: ReplicaBatch
    """This replica's, as one mini-batch."""
    mine: list[Trajectory]
    """As ``Batch.mine``."""


@dataclass
class Batch:
    """A step's trajectories: this replica's, in mini- and micro-batches."""

    minibatches: ReplicaBatch
    """This replica's. Every replica has the same number of micro-batches; some may be empty."""
    mine: list[Trajectory]
    """Leaders (``Mesh.leads``): the trajectories of ``minibatches`` in the order of the prompts, with all
    their fields. Elsewhere empty.
    """
    index: BatchIndex | None
    """Rank 0: lengths and rewards of all trajectories. Elsewhere None."""
    shared: tuple[int, int] = (0, 0)
    """Rank 0: of ``packing.count_shared``."""
    probes: ProbeBatch | None = None
    """With ``rollout.probed``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step so far; complete on rank 0."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """Rank 0: the sampler's state after these rollouts."""
    failures: FailureCount = field(default_factory=FailureCount)
    """Rank 0: failures of the reward."""
    started: Accumulated | None = None
    """The first update after ``Trainer.start_update``: its gradients."""
    compared: list[Trajectory] | None = None
    """Leaders: trajectories with the trainer's log-probs as ``old``, for the guard on mismatch. None: those
    of ``mine``."""
    totals: dict[str, Any] = field(default_factory=dict)
    """Sums behind metrics that are collected in several parts."""

    def add(self, name: str, sums: Any) -> Any:
        """Add sums over all ranks to those of the step's other parts; returns the new sums."""
        self.totals[name] = self.totals[name] + sums if name in self.totals else sums
        return self.totals[name]

"""Number of GPUs of a run, and host memory of the node of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpg_megatron.commands.plan.batch import BatchPlan
from rpg_megatron.commands.plan.trainer_memory import Basis, RankMemory
from rpg_megatron.config import Settings, UserError
from rpg_megatron.launcher.nodes import NodeAssignment, assign_node

GPUS_PER_NODE = 8

_TRAJECTORY = 1500
"""Bytes of a trajectory in Python besides its tokens: the object, seven arrays, strings; measured."""
_PROMPT = 4
"""Bytes of a prompt's token: int32."""
_RESPONSE = 25
"""Bytes of a response's token: id and weight version, int32; mask, bool; log-probs of engine, trainer and
anchor, float32; text, assumed to be four characters."""
_SCORES = 8
"""Bytes of these for the log-probs of trainer and anchor."""
_SENT_TOKEN = 8
"""Bytes of a token sent to a rank (``training.batch_scatter``): id and the engine's log-prob."""
_SENT_TRAJECTORY = 28
"""Bytes of a sent trajectory besides its tokens: six int32 and the advantage."""


@dataclass(frozen=True)
class Gpus:
    """The run's GPUs, by role and by node."""

    trainer: int
    engines: int
    colocated: bool
    nodes: tuple[tuple[int, int], ...]
    """Trainer ranks and engine workers per node, on the fewest nodes of 8 GPUs; empty: see ``why``."""
    why: str
    """Why they cannot be placed on nodes of 8 GPUs; empty if they can."""

    @property
    def total(self) -> int:
        """Number of GPUs on all nodes; a GPU shared by a rank and a worker counts once."""
        return self.trainer if self.colocated else self.trainer + self.engines


def count_gpus(settings: Settings) -> Gpus:
    """The GPUs that these settings need, and the fewest nodes that provide them."""
    engine = settings.engine
    trainer, workers = settings.parallel.world, engine.replicas * engine.tensor
    total = trainer if engine.colocated else trainer + workers
    why = ""
    for count in range(-(-total // GPUS_PER_NODE), 2 * -(-total // GPUS_PER_NODE) + 1):
        try:
            nodes = [_gpus_on(assign_node(settings, node, count), settings) for node in range(count)]
        except UserError as e:
            why = why or str(e)
            continue
        used = max(max(held) if engine.colocated else sum(held) for held in nodes)
        if used <= GPUS_PER_NODE:
            return Gpus(trainer, workers, engine.colocated, tuple(nodes), "")
        why = why or f"on {count} nodes, one would have {used}"
    return Gpus(trainer, workers, engine.colocated, (), why)


def _gpus_on(share: NodeAssignment, settings: Settings) -> tuple[int, int]:
    return len(share.ranks), len(share.engines) * settings.engine.tensor


@dataclass(frozen=True)
class HostPart:
    """A part of a node's host memory."""

    name: str
    nbytes: int
    basis: Basis


def batch_bytes(trajectories: int, prompt_tokens: int, response_tokens: int, *, scored: bool = True) -> int:
    """Bytes of trajectories on a leader, or in a sampler worker.

    prompt_tokens, response_tokens: totals. scored: whether they have the trainer's log-probs (on a leader).
    """
    each = _RESPONSE if scored else _RESPONSE - _SCORES
    return trajectories * _TRAJECTORY + prompt_tokens * _PROMPT + response_tokens * each


def broadcast_bytes(trajectories: int, tokens: int, data: int) -> int:
    """Additional bytes on a leader while it broadcasts its part, one of ``data``, within its replica.

    trajectories, tokens (with prompts): of the whole step.
    """
    rows, each = -(-trajectories // data), -(-tokens // data)
    return rows * _SENT_TRAJECTORY + each * _SENT_TOKEN


def step_parts(settings: Settings, batch: BatchPlan, ranks: int) -> list[HostPart]:
    """Host memory of a step on rank 0's node, if all sequences have the maximum length.

    ranks: number of ranks on this node. The sampler's workers are also on it, and hold the whole step until
    the leaders have fetched their parts, with ``rollout.ahead`` also the steps sampled ahead.
    """
    parallel, number = settings.parallel, batch.sequences
    response = min(settings.rollout.max_response_tokens, batch.longest)
    lengths = number, number * (batch.longest - response), number * response
    replica = parallel.tensor * parallel.context  # ranks of one, on a pipeline stage
    leaders = min(-(-ranks // replica), parallel.data)
    held = batch_bytes(*lengths) * leaders // parallel.data
    steps = 1 + settings.rollout.ahead
    name = f"{steps} steps, in the sampler" if steps > 1 else "the step, in the sampler"
    parts = [
        HostPart(name, steps * batch_bytes(*lengths, scored=False), "estimated"),
        HostPart(f"shares of it, {leaders} of {parallel.data} leaders", held, "estimated"),
    ]
    if parallel.world > parallel.data:
        moved = leaders * broadcast_bytes(number, number * batch.longest, parallel.data)
        parts.append(HostPart("shares in transfer to other ranks", moved, "estimated"))
    return parts


def host_parts(
    settings: Settings, batch: BatchPlan, ranks: Sequence[RankMemory], gpus: Gpus
) -> tuple[HostPart, ...]:
    """Host memory of rank 0's node, with the policy on GPUs. ranks: one of each kind.

    Does not include libraries, engine processes and page cache.
    """
    parallel = settings.parallel
    here = range(gpus.nodes[0][0] if gpus.nodes else min(GPUS_PER_NODE, parallel.world))
    kinds = {(rank.stage, rank.publishes): rank for rank in ranks}
    nbytes: dict[str, int] = {}
    for number in here:  # Megatron numbers ranks tensor, context, data, pipeline
        replica, stage = number // parallel.tensor, number // (parallel.world // parallel.pipeline)
        publishes = replica % (parallel.context * parallel.data) == 0
        for part in kinds[stage, publishes].parts:
            if part.host:
                nbytes[part.name] = nbytes.get(part.name, 0) + part.nbytes
    of_ranks = f", {len(here)} rank{'s' if len(here) > 1 else ''}"
    kept = [HostPart(name + of_ranks, size, "estimated") for name, size in nbytes.items()]
    return (*kept, *step_parts(settings, batch, len(here)))

"""Cut a step's trajectories into mini-batches, data-parallel shares and packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[list[list[int]]]]
"""[data rank][mini-batch][micro-batch] -> indices of trajectories, ascending."""


def plan_batches(lengths: Sequence[int], *, minibatches: int, data: int, budget: int) -> Plan:
    """Assign every trajectory to one data rank, mini-batch and micro-batch.

    ``lengths`` (tokens) stand in the order of the step's prompts; mini-batches are consecutive equal slices
    of it. Within one, trajectories are balanced over the data ranks by tokens, then packed to ``budget``
    tokens by first-fit-decreasing; one that is longer than the budget gets a micro-batch of its own. All data
    ranks get the same number of micro-batches, so that collectives pair up; a rank with too little work gets
    empty ones.
    Raises ValueError if the trajectories do not divide into the mini-batches.
    """
    if len(lengths) % minibatches:
        raise ValueError(f"{len(lengths)} trajectories do not divide into {minibatches} mini-batches")
    size = len(lengths) // minibatches
    plan: Plan = [[] for _ in range(data)]
    for m in range(minibatches):
        shares = _balance(range(m * size, (m + 1) * size), lengths, data)
        packs = [_pack(share, lengths, budget) for share in shares]
        most = max(len(p) for p in packs)
        for rank, mine in enumerate(packs):
            plan[rank].append(mine + [[] for _ in range(most - len(mine))])
    return plan


def _balance(indices: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        shares[rank].append(i)
        load[rank] += lengths[i]
    return shares


def _pack(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing."""
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        slot = next((s for s, free in enumerate(room) if free >= lengths[i]), None)
        if slot is None:
            packs.append([i])
            room.append(budget - lengths[i])
        else:
            packs[slot].append(i)
            room[slot] -= lengths[i]
    return [sorted(p) for p in packs]

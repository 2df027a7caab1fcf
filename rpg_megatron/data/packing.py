"""Cut a step's trajectories into mini-batches, data-parallel shares and packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Plan = list[list[list[list[int]]]]
"""[data rank][mini-batch][micro-batch] -> indices of trajectories, ascending."""

_EVEN = 1.01
"""Largest over mean cost of the data ranks in a mini-batch at which it counts as balanced."""


def plan_batches(
    lengths: Sequence[int],
    *,
    minibatches: int,
    data: int,
    budget: int,
    context: int = 1,
    attention_length: float = math.inf,
) -> Plan:
    """Assign every trajectory to one data rank, mini-batch and micro-batch.

    ``lengths`` (tokens) stand in the order of the step's prompts; mini-batches are consecutive equal slices
    of it. Each is packed to ``budget`` tokens by first-fit-decreasing, counting what ``context`` ranks need
    in addition; a trajectory that is longer than the budget gets a micro-batch of its own. All data ranks get
    the same number of micro-batches, so that collectives pair up: the costliest packs are cut in two until
    there are enough, and only where nothing is left to cut a rank gets empty ones.

    The cost of a sequence of n tokens is n + n^2 / ``attention_length``. The ranks' costs are balanced in
    each micro-batch and over all of them; costly micro-batches come first.
    Raises ValueError if the trajectories do not divide into the mini-batches.
    """
    if len(lengths) % minibatches:
        raise ValueError(f"{len(lengths)} trajectories do not divide into {minibatches} mini-batches")
    size = len(lengths) // minibatches
    filled = [fill_length(n, context) for n in lengths]
    costs = [n + n * n / attention_length for n in lengths]
    plan: Plan = [[] for _ in range(data)]
    for m in range(minibatches):
        packs = _pack(range(m * size, (m + 1) * size), filled, budget)
        _cut_to_multiple(packs, costs, data)
        for rank, share in enumerate(_deal(packs, costs, data)):
            plan[rank].append([sorted(pack) for pack in share])
    return plan


def fill_length(length: int, context: int) -> int:
    """Places that a sequence takes when it is cut over ``context`` ranks."""
    multiple = sequence_multiple(context)
    return -(-length // multiple) * multiple


def sequence_multiple(context: int) -> int:
    """Each of ``context`` ranks holds two equal chunks of a sequence; one rank holds it whole."""
    return 2 * context if context > 1 else 1


def _pack(indices: Iterable[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
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
    return packs


def _cut_to_multiple(packs: list[list[int]], costs: Sequence[float], data: int) -> None:
    """Cut the costliest packs in two, in place, until their number is a multiple of ``data``."""
    while len(packs) % data:
        several = [pack for pack in packs if len(pack) > 1]
        if not several:
            packs.append([])
            continue
        pack = max(several, key=lambda pack: _cost(pack, costs))
        halves: list[list[int]] = [[], []]
        for i in sorted(pack, key=lambda i: (-costs[i], i)):
            min(halves, key=lambda half: _cost(half, costs)).append(i)
        packs.remove(pack)
        packs += halves


def _deal(packs: list[list[int]], costs: Sequence[float], data: int) -> list[list[list[int]]]:
    """As many packs to each rank: those of like cost side by side, then exchanged until the sums are even."""
    ordered = sorted(packs, key=lambda pack: (-_cost(pack, costs), pack))
    shares: list[list[list[int]]] = [[] for _ in range(data)]
    load = [0.0] * data
    for start in range(0, len(ordered), data):
        poorest_first = sorted(range(data), key=lambda rank: (load[rank], rank))
        for rank, pack in zip(poorest_first, ordered[start : start + data], strict=True):
            shares[rank].append(pack)
            load[rank] += _cost(pack, costs)
    while max(load) * data > _EVEN * sum(load) and _exchange(shares, load, costs):
        pass
    return [sorted(share, key=lambda pack: (-_cost(pack, costs), pack)) for share in shares]


def _exchange(shares: list[list[list[int]]], load: list[float], costs: Sequence[float]) -> bool:
    """Swap a pack of the costliest rank with one of another, in place, if that lowers both ranks' larger sum.

    The swap that leaves the pair most even is taken. Every swap lowers the largest sum, or the number of
    ranks that have it, so this comes to an end.
    """
    high = max(range(len(load)), key=lambda rank: load[rank])
    best, found = load[high] * (1 - 1e-9), None
    for low in range(len(load)):
        for i, mine in enumerate(shares[high] if low != high else []):
            for j, other in enumerate(shares[low]):
                step = _cost(mine, costs) - _cost(other, costs)
                larger = max(load[high] - step, load[low] + step)
                if step > 0 and larger < best:
                    best, found = larger, (low, i, j, step)
    if found is None:
        return False
    low, i, j, step = found
    shares[high][i], shares[low][j] = shares[low][j], shares[high][i]
    load[high] -= step
    load[low] += step
    return True


def _cost(pack: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in pack)

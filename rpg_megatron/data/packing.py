"""Sequence packing: split a step's trajectories into mini-batches, data-parallel shares and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Plan = list[list[list[list[int]]]]
"""[data rank][mini-batch][micro-batch] -> indices of trajectories, ascending."""

_BALANCED = 1.01
"""Ratio of largest to mean cost of the data ranks at which a mini-batch counts as balanced."""


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

    ``lengths`` (tokens) are in the order of the step's prompts; mini-batches are consecutive equal slices of
    it. Each is packed into micro-batches of ``budget`` tokens by first-fit-decreasing, including the padding
    for ``context`` ranks; a trajectory longer than the budget gets a micro-batch of its own. All data ranks
    get the same number of micro-batches, so that their collectives match: the costliest micro-batches are
    split in two until there are enough; if none can be split, some ranks get empty ones.

    The cost of a sequence of n tokens is n + n^2 / ``attention_length``. The ranks' costs are balanced per
    micro-batch and in total; costly micro-batches come first.
    Raises ValueError if the number of trajectories is not a multiple of ``minibatches``.
    """
    if len(lengths) % minibatches:
        raise ValueError(f"{len(lengths)} trajectories do not divide into {minibatches} mini-batches")
    size = len(lengths) // minibatches
    padded = [fill_length(n, context) for n in lengths]
    costs = [n + n * n / attention_length for n in lengths]
    plan: Plan = [[] for _ in range(data)]
    for m in range(minibatches):
        micro_batches = _pack(range(m * size, (m + 1) * size), padded, budget)
        _split_to_multiple(micro_batches, costs, data)
        for rank, share in enumerate(_distribute(micro_batches, costs, data)):
            plan[rank].append([sorted(micro) for micro in share])
    return plan


def pack_rows(lengths: Sequence[int], budget: int, context: int = 1) -> list[list[int]]:
    """Indices of sequences, packed into rows of ``budget`` tokens by first-fit-decreasing."""
    return _pack(range(len(lengths)), [fill_length(n, context) for n in lengths], budget)


def fill_length(length: int, context: int) -> int:
    """Length of a sequence, padded to a multiple of ``sequence_multiple(context)``."""
    multiple = sequence_multiple(context)
    return -(-length // multiple) * multiple


def sequence_multiple(context: int) -> int:
    """Each of ``context`` ranks holds two equal chunks of a sequence; a single rank holds all of it."""
    return 2 * context if context > 1 else 1


def _pack(indices: Iterable[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        first = next((b for b, tokens in enumerate(free) if tokens >= lengths[i]), None)
        if first is None:
            bins.append([i])
            free.append(budget - lengths[i])
        else:
            bins[first].append(i)
            free[first] -= lengths[i]
    return bins


def _split_to_multiple(micro_batches: list[list[int]], costs: Sequence[float], data: int) -> None:
    """Split the costliest micro-batches in two, in place, until their number is a multiple of ``data``."""
    while len(micro_batches) % data:
        divisible = [micro for micro in micro_batches if len(micro) > 1]
        if not divisible:
            micro_batches.append([])
            continue
        costliest = max(divisible, key=lambda micro: _cost(micro, costs))
        halves: list[list[int]] = [[], []]
        for i in sorted(costliest, key=lambda i: (-costs[i], i)):
            min(halves, key=lambda half: _cost(half, costs)).append(i)
        micro_batches.remove(costliest)
        micro_batches += halves


def _distribute(micro_batches: list[list[int]], costs: Sequence[float], data: int) -> list[list[list[int]]]:
    """The same number of micro-batches for each rank, of similar cost at each index, then swapped until the
    ranks' total costs are balanced.
    """
    ordered = sorted(micro_batches, key=lambda micro: (-_cost(micro, costs), micro))
    shares: list[list[list[int]]] = [[] for _ in range(data)]
    load = [0.0] * data
    for start in range(0, len(ordered), data):
        least_loaded_first = sorted(range(data), key=lambda rank: (load[rank], rank))
        for rank, micro in zip(least_loaded_first, ordered[start : start + data], strict=True):
            shares[rank].append(micro)
            load[rank] += _cost(micro, costs)
    while max(load) * data > _BALANCED * sum(load) and _exchange(shares, load, costs):
        pass
    return [sorted(share, key=lambda micro: (-_cost(micro, costs), micro)) for share in shares]


def _exchange(shares: list[list[list[int]]], load: list[float], costs: Sequence[float]) -> bool:
    """Swap a micro-batch of the costliest rank with one of another rank, in place, if the larger of the two
    ranks' costs decreases. Returns whether a swap was made.

    The swap that balances the pair best is made. Each swap lowers the largest cost, or the number of ranks
    that have it, so repeated calls terminate.
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


def _cost(micro: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in micro)

"""The rule of ``rpg_megatron.data.packing`` in its plainest form: every candidate is tried.

Cubic in places. The product's plans must equal its plans, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rpg_megatron.data.packing import Plan, padded_length

_BALANCED = 1.01


def plan_batches(
    lengths: Sequence[int],
    *,
    minibatches: int,
    data: int,
    budget: int,
    context: int = 1,
    attention_length: float = math.inf,
) -> Plan:
    """As ``rpg_megatron.data.packing.plan_batches``."""
    size = len(lengths) // minibatches
    padded = [padded_length(n, context) for n in lengths]
    costs = [n + n * n / attention_length for n in lengths]
    plan: Plan = [[] for _ in range(data)]
    for m in range(minibatches):
        micro_batches = _pack(range(m * size, (m + 1) * size), padded, budget)
        _split_to_multiple(micro_batches, costs, data)
        for rank, share in enumerate(_distribute(micro_batches, costs, data)):
            plan[rank].append([sorted(micro) for micro in share])
    return plan


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
    best, swap = load[high] * (1 - 1e-9), None
    for low in range(len(load)):
        for i, given in enumerate(shares[high] if low != high else []):
            for j, received in enumerate(shares[low]):
                step = _cost(given, costs) - _cost(received, costs)
                larger = max(load[high] - step, load[low] + step)
                if step > 0 and larger < best:
                    best, swap = larger, (low, i, j, step)
    if swap is None:
        return False
    low, i, j, step = swap
    shares[high][i], shares[low][j] = shares[low][j], shares[high][i]
    load[high] -= step
    load[low] += step
    return True


def _cost(micro: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in micro)

"""Sequence packing: split a step's trajectories into mini-batches, data-parallel shares and micro-batches."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain

Plan = list[list[list[list[int]]]]
"""[data rank][mini-batch][micro-batch] -> indices of trajectories, ascending."""

Prompt = tuple[Hashable, int]
"""Of a trajectory that may share its prompt with others: what is equal for all that can, and the tokens that
they share (``row_layout.shareable``); 0: it shares none.
"""

_WithCost = tuple[float, list[int]]
"""Cost of a micro-batch, and its trajectories."""

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
    starts: Sequence[int] | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> Plan:
    """Assign every trajectory to one data rank, mini-batch and micro-batch.

    ``lengths`` (tokens) are in the order of the step's prompts. ``starts``: the first trajectory of each
    response; None: each response has one. Mini-batches are consecutive slices with equal numbers of
    responses. Each is packed into micro-batches of ``budget`` tokens by first-fit-decreasing, including the
    padding for ``context`` ranks; a trajectory longer than the budget gets a micro-batch of its own. All data
    ranks get the same number of micro-batches, so that their collectives match: the costliest micro-batches
    are split in two until there are enough. If none can be split, some ranks get empty ones.

    prompts: of each trajectory. Those that share one are kept together, as far as the budget allows and every
    rank gets some, and their prompt counts once.

    The cost of a sequence of n tokens is n + n^2 / ``attention_length``. The ranks' costs are balanced per
    micro-batch and in total; costly micro-batches come first.
    Raises ValueError if the number of responses is not a multiple of ``minibatches``.
    """
    bounds = [*(range(len(lengths)) if starts is None else starts), len(lengths)]
    size, rest = divmod(len(bounds) - 1, minibatches)
    if rest:
        raise ValueError(f"{len(bounds) - 1} responses do not divide into {minibatches} mini-batches")
    sizes = _Sizes(lengths, prompts, context, attention_length)
    plan: Plan = [[] for _ in range(data)]
    for m in range(minibatches):
        units = _units(range(bounds[m * size], bounds[(m + 1) * size]), sizes, budget, data)
        costs = [sizes.cost(unit) for unit in units]
        micro_batches = _pack(range(len(units)), [sizes.padded(unit) for unit in units], budget)
        _split_to_multiple(micro_batches, costs, data)
        for rank, share in enumerate(_distribute(micro_batches, costs, data)):
            plan[rank].append([sorted(i for number in micro for i in units[number]) for micro in share])
    return plan


def pack_rows(
    lengths: Sequence[int], budget: int, context: int = 1, prompts: Sequence[Prompt] | None = None
) -> list[list[int]]:
    """Pack sequences into rows of ``budget`` tokens by first-fit-decreasing; returns indices per row.

    prompts: see ``plan_batches``.
    """
    sizes = _Sizes(lengths, prompts, context, math.inf)
    units = _units(range(len(lengths)), sizes, budget, 1)
    rows = _pack(range(len(units)), [sizes.padded(unit) for unit in units], budget)
    return [[i for number in row for i in units[number]] for row in rows]


class _Sizes:
    """Sizes and costs of units: trajectories that stand behind one copy of a prompt, or a single one."""

    def __init__(
        self,
        lengths: Sequence[int],
        prompts: Sequence[Prompt] | None,
        context: int,
        attention_length: float,
    ) -> None:
        self.lengths, self.prompts, self.context = lengths, prompts, context
        self._attention_length = attention_length

    def padded(self, unit: Sequence[int]) -> int:
        """Positions, with the padding for context ranks."""
        if len(unit) == 1:
            return padded_length(self.lengths[unit[0]], self.context)
        return self.prompt(unit[0]) + sum(self.own(i) for i in unit)

    def prompt(self, i: int) -> int:
        """Positions of a trajectory's shared prompt, padding included."""
        assert self.prompts is not None
        return padded_length(self.prompts[i][1], self.context)

    def own(self, i: int) -> int:
        """Positions of a trajectory behind its shared prompt, padding included."""
        assert self.prompts is not None
        return padded_length(self.lengths[i] - self.prompts[i][1], self.context)

    def cost(self, unit: Sequence[int]) -> float:
        """The cost of a unit; that of the prompt counts once."""
        costs = sum(self._cost(self.lengths[i]) for i in unit)
        if len(unit) == 1:
            return costs
        assert self.prompts is not None
        return costs - (len(unit) - 1) * self._cost(self.prompts[unit[0]][1])

    def _cost(self, n: int) -> float:
        return n + n * n / self._attention_length


def _units(indices: Iterable[int], sizes: _Sizes, budget: int, data: int) -> list[list[int]]:
    """The trajectories that stand behind one copy of a prompt, each at most a micro-batch of ``budget``.

    Units that cost more than the mean of the ``data`` ranks are split in two, with a copy of the prompt each.
    """
    if sizes.prompts is None:
        return [[i] for i in indices]
    units: list[list[int]] = []
    clusters: dict[Hashable, list[int]] = {}
    for i in indices:
        key, shared = sizes.prompts[i]
        if shared:
            clusters.setdefault((key, shared), []).append(i)
        else:
            units.append([i])
    for members in clusters.values():
        own = {i: sizes.own(i) for i in members}
        units += _pack(members, own, budget - sizes.prompt(members[0]))
    heap = [(-sizes.cost(unit), number, unit) for number, unit in enumerate(units)]
    heapq.heapify(heap)
    total, number = -sum(cost for cost, *_ in heap), len(heap)
    while heap and -heap[0][0] * data > total and len(heap[0][2]) > 1:
        cost, _, unit = heapq.heappop(heap)
        total += cost
        by_length = sorted(unit, key=lambda i: (-sizes.lengths[i], i))
        for half in (by_length[::2], by_length[1::2]):
            cost = sizes.cost(half)
            total += cost
            heapq.heappush(heap, (-cost, number, half))
            number += 1
    return sorted(unit for *_, unit in heap)


def count_shared(plan: Plan, prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Prompt tokens that a plan's micro-batches do not compute again, and the sum of the prompts' squares."""
    tokens = squares = 0
    for micro in chain.from_iterable(chain.from_iterable(plan)):
        for (_, shared), members in Counter(prompts[i] for i in micro).items():
            tokens += (members - 1) * shared
            squares += (members - 1) * shared**2
    return tokens, squares


def padded_length(length: int, context: int) -> int:
    """Length of a sequence, padded to a multiple of ``sequence_multiple(context)``."""
    multiple = sequence_multiple(context)
    return -(-length // multiple) * multiple


def sequence_multiple(context: int) -> int:
    """Each of ``context`` ranks holds two equal chunks of a sequence; a single rank holds all of it."""
    return 2 * context if context > 1 else 1


def _pack(indices: Iterable[int], lengths: Sequence[int] | Mapping[int, int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing.

    Each node of a binary tree, whose leaves are the bins, has the largest free space below it. So the first
    bin with enough space is found without scanning all bins. Empty bins are leaves with space ``budget``.
    """
    items = sorted(indices, key=lambda i: (-lengths[i], i))
    leaves = 1 << len(items).bit_length()
    space = [budget] * (2 * leaves)  # node n has the children 2n and 2n + 1
    bins: list[list[int]] = []
    for i in items:
        length = lengths[i]
        node = 1 if length <= budget else leaves + len(bins)
        while node < leaves:
            node *= 2
            node += space[node] < length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(i)
        space[node] -= length
        while (node := node // 2) and space[node] != (larger := max(space[2 * node], space[2 * node + 1])):
            space[node] = larger
    return bins


def _split_to_multiple(micro_batches: list[list[int]], costs: Sequence[float], data: int) -> None:
    """Split the costliest micro-batches in two, in place, until their number is a multiple of ``data``."""
    if len(micro_batches) % data == 0:
        return
    by_number = dict(enumerate(micro_batches))
    # The costliest first; if several are equal, the first in the list. Halves are appended to it.
    divisible = [(-_cost(micro, costs), n) for n, micro in by_number.items() if len(micro) > 1]
    heapq.heapify(divisible)
    last = len(by_number)
    while len(by_number) % data:
        if not divisible:
            by_number[last] = []
            last += 1
            continue
        costliest = by_number.pop(heapq.heappop(divisible)[1])
        halves: list[list[int]] = [[], []]
        halves_cost = [0.0, 0.0]
        for i in sorted(costliest, key=lambda i: (-costs[i], i)):
            half = 0 if halves_cost[0] <= halves_cost[1] else 1
            halves[half].append(i)
            halves_cost[half] = _cost(halves[half], costs)
        for micro, cost in zip(halves, halves_cost, strict=True):
            by_number[last] = micro
            if len(micro) > 1:
                heapq.heappush(divisible, (-cost, last))
            last += 1
    micro_batches[:] = by_number.values()


def _distribute(micro_batches: list[list[int]], costs: Sequence[float], data: int) -> list[list[list[int]]]:
    """Give each rank the same number of micro-batches, of similar cost at each index; then swap some until
    the ranks' total costs are balanced.
    """
    ordered = sorted((-_cost(micro, costs), micro) for micro in micro_batches)
    shares: list[list[_WithCost]] = [[] for _ in range(data)]
    load = [0.0] * data
    for start in range(0, len(ordered), data):
        least_loaded_first = sorted(range(data), key=lambda rank: (load[rank], rank))
        for rank, (negative, micro) in zip(least_loaded_first, ordered[start : start + data], strict=True):
            shares[rank].append((-negative, micro))
            load[rank] -= negative
    while max(load) * data > _BALANCED * sum(load) and _exchange(shares, load):
        pass
    return [[micro for _, micro in sorted(share, key=lambda p: (-p[0], p[1]))] for share in shares]


def _exchange(shares: list[list[_WithCost]], load: list[float]) -> bool:
    """Swap a micro-batch of the costliest rank with one of another rank, in place, if the larger of the two
    ranks' costs decreases. Returns whether a swap was made.

    The swap that balances the pair best is made. Each swap lowers the largest cost, or the number of ranks
    that have it, so repeated calls terminate.
    """
    high = max(range(len(load)), key=lambda rank: load[rank])
    best, partner = load[high] * (1 - 1e-9), -1
    own_costs = sorted(cost for cost, _ in shares[high])
    for low in range(len(load)):
        if low != high:
            others = sorted(cost for cost, _ in shares[low])
            if (reached := _best_swap(own_costs, others, load[high], load[low])) < best:
                best, partner = reached, low
    if partner < 0:
        return False
    # The first pair of micro-batches that leads to this cost.
    for i, (cost, _) in enumerate(shares[high]):
        for j, (other, _) in enumerate(shares[partner]):
            step = cost - other
            if max(load[high] - step, load[partner] + step) == best:
                shares[high][i], shares[partner][j] = shares[partner][j], shares[high][i]
                load[high] -= step
                load[partner] += step
                return True
    raise AssertionError("unreachable: the best swap exists")


def _best_swap(own: Sequence[float], others: Sequence[float], high: float, low: float) -> float:
    """The smallest cost, of the costlier of two ranks, that swapping one micro-batch leads to; infinity if
    none lowers ``high``.

    own, others: costs of the ranks' micro-batches, ascending; high >= low: the ranks' costs. The larger cost
    falls with the step between the two micro-batches until the ranks change places, and rises from there. So
    each of ``own`` needs only the two of ``others`` around that point, which moves up with it.
    """
    best, point = math.inf, 0
    for cost in own:
        while point < len(others) and high - (cost - others[point]) < low + (cost - others[point]):
            point += 1
        if point > 0:  # the ranks change places
            best = min(best, low + (cost - others[point - 1]))
        if point < len(others):
            best = min(best, high - (cost - others[point]))
    return best


def _cost(micro: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in micro)

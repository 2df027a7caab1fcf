"""Time to plan a step's batch on rank 0, against the plain rule that the plans are equal to.

    python -m benchmarks.packing [--trajectories 8192 81920] [--plain 8192]

CPU seconds, of which rank 0 alone needs them; the other ranks wait. Lengths are log-normal with a median of
3,000 tokens, cut at 9,216. The plain rule (``tests/support/plain_packing.py``) is run up to ``--plain``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from rpg_megatron.data.packing import Plan, plan_batches
from tests.support import plain_packing

CASES = ((8, 2), (64, 2), (64, 16), (512, 16))
"""Data ranks and mini-batches."""


def main() -> None:
    """Print a line for each number of trajectories and layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[8192, 81920])
    parser.add_argument("--plain", type=int, default=8192, help="most trajectories for the plain rule")
    a = parser.parse_args()
    print("trajectories   DP  mini-batches  CPU seconds    plain  ratio")
    for count in a.trajectories:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(math.log(3000), 0.8, count), 2, 9216).astype(int).tolist()
        for data, minibatches in CASES:
            seconds, plan = timed(plan_batches, lengths, data, minibatches)
            told = f"{count:12,} {data:4} {minibatches:13} {seconds:12.3f}"
            if count <= a.plain:
                plain, expected = timed(plain_packing.plan_batches, lengths, data, minibatches)
                assert plan == expected
                told += f" {plain:8.3f} {plain / seconds:6.1f}"
            print(told, flush=True)


def timed(
    function: Callable[..., Plan], lengths: list[int], data: int, minibatches: int
) -> tuple[float, Plan]:
    """CPU seconds of a plan, and the plan."""
    start = time.process_time()
    plan = function(lengths, minibatches=minibatches, data=data, budget=18432, attention_length=30000)
    return time.process_time() - start, plan


if __name__ == "__main__":
    main()

"""The quick search for rows and swaps makes exactly the plans of a search over every candidate.

Why: a run that resumes, or is compared with an earlier one, must cut its batches as before, and so must any
later speed-up. Not covered: time (``python -m benchmarks.scale packing``).
"""

import math

import numpy as np
import pytest

from rpg_megatron.data import packing
from tests.support import plain_packing

BUDGET = 4096


def lengths_of(kind: str, count: int, rng: np.random.Generator) -> list[int]:
    """Random lengths: log-normal, many equal, some longer than a row, one to a row, or many."""
    drawn = {
        "mixed": np.clip(rng.lognormal(math.log(900), 1.0, count), 2, BUDGET),
        "equal": rng.choice([64, 512, 1024, 1365, 2048], count),
        "long": rng.integers(2, 2 * BUDGET, count),
        "alone": rng.choice([2049, 2200, 3000, 4096], count),
        "short": rng.integers(1, 1000, count),
    }[kind]
    return [int(n) for n in drawn]


@pytest.mark.parametrize("kind", ["mixed", "equal", "long", "alone", "short"])
def test_plans_are_those_of_the_plain_rule(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = []
    exchange = packing._exchange
    monkeypatch.setattr(packing, "_exchange", lambda *a: swaps.append(exchange(*a)) or swaps[-1])
    for seed in range(40):
        rng = np.random.default_rng(seed)
        minibatches, data = int(rng.choice([1, 2, 4])), int(rng.integers(1, 9))
        lengths = lengths_of(kind, minibatches * int(rng.integers(1, 60)), rng)
        settings = {
            "minibatches": minibatches,
            "data": data,
            "budget": BUDGET,
            "context": int(rng.choice([1, 1, 2])),
            "attention_length": float(rng.choice([900.0, 30000.0, math.inf])),
        }
        expected = plain_packing.plan_batches(lengths, **settings)  # type: ignore[arg-type]
        assert packing.plan_batches(lengths, **settings) == expected, (seed, settings)  # type: ignore[arg-type]
    assert sum(swaps) >= 10, "no test of swaps without swaps"

"""An update whose gradient is not finite on a single rank is skipped by all of them, and changes nothing.

Why: Megatron's optimizer steps in float32 and bfloat16 whatever the norm is: one overflow on one rank, and
every weight is NaN; a rank that skips alone then has different weights, without any error.
Proved, with real Megatron over gloo in fp32, where a hook spoils one parameter's gradient on the last rank (a
norm's, of which the gradient norm counts the first rank's copy only, or one that is cut):
weights, master weights, both moments and step counts of every rank are the same bits after a step of two such
updates, both are counted, and the next step is the one of a trainer that never saw them; three in a row end
the run with a message, on every rank, that names step, parameter and rank. For TP2, PP2 and DP2, plain,
distributed, Muon, and Schedule-Free (its weights after the step and the next step to rounding, the rest
exactly).
Log-probs scored in rows that join the mini-batches are those of each sequence alone. Not covered: GPUs,
bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.layouts import make_case, write_rewarded_batch
from tests.support.ranks import run_ranks

PLAIN, CUT = {"distributed": False}, {"distributed": True}
CASES = {
    "TP2": ({"tensor": 2}, PLAIN),
    "TP2, a parameter that is cut": ({"tensor": 2}, PLAIN),
    "TP2, distributed": ({"tensor": 2}, CUT),
    "PP2": ({"pipeline": 2}, PLAIN),
    "DP2": ({"data": 2}, PLAIN),
    "DP2, distributed": ({"data": 2}, CUT),
    "DP2, schedule-free": ({"data": 2}, {"type": "schedule_free_adamw", **PLAIN}),
    "TP2, Muon": ({"tensor": 2}, {"type": "muon", **PLAIN}),
}


FEW = ("TP2, a parameter that is cut", "DP2, distributed", "DP2, schedule-free")
"""Cases of the default tier."""


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(CASES), marks=pytest.mark.long)], ids=["few", "all"]
)
def test_one_bad_rank_and_nothing_changes_on_any(tmp_path: Path, names: tuple[str, ...]) -> None:
    write_rewarded_batch(tmp_path, 4)
    settings = {
        "training": {"minibatches": 2, "tokens_per_microbatch": 100, "logprob_chunk": 17},
    }
    cases = {
        name: make_case(
            tmp_path / "model",
            parallel,
            0,
            settings | {"optimizer": {"lr": 1e-3, "clip_grad": 1.0, **optimizer}},
        )
        | {"rank": 1, "parameter": "linear_fc1" if "cut" in name else "pre_mlp_layernorm"}
        for name, (parallel, optimizer) in CASES.items()
        if name in names
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    results = run_ranks("tests.distributed.skip_worker", 2, tmp_path)
    assert results.keys() == set(names)
    for name, result in results.items():
        culprit = result["ranks"][1]["name"]
        for rank in result["ranks"]:
            assert rank["metrics"]["policy/skipped_updates"] == 2, name
            assert "policy/grad_norm" not in rank["metrics"], name
            moved, apart, equal = rank["changed"], rank["apart"], rank["after"][0]
            if "schedule-free" in name:
                # Going to the point that takes the gradients, and back, rounds weights, so the next step is
                # the other trainer's to rounding; one update moves weights by up to 1e-3.
                moved = [key for key in moved if not key.startswith(("weight ", "master "))]
                apart = {key: gap for key, gap in apart.items() if not gap < 1e-6}
                equal = pytest.approx(rank["after"][0], rel=1e-5)
            assert not moved, name
            assert not apart, name
            assert rank["scored"] < 1e-5, name
            assert rank["after"][1] == equal, name
            assert rank["after"][1] > 0, name
            assert "step 5, update 1 of 2: the gradient is not finite (norm " in rank["said"], name
            assert f"{culprit} on rank 1" in rank["said"], (name, rank["said"])
            assert "like 2 before it in a row. Lower" in rank["said"], (
                name,
                rank["said"],
            )
    log = (tmp_path / "rank_0.log").read_text()
    assert "warning: step 2, update 1 of 2: the gradient is not finite (norm " in log

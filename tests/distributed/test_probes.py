"""A step with ``rollout.ahead`` on ranks: probes are scored with it, compared, and change nothing in it.

Why: a batch that was sampled ahead may have no token of the present weights, and the guard on mismatch would
be silent. Proved, with real Megatron in fp32 and a sampler that is a stand-in: every probe is fetched once,
before the sampler forgets it, and scored in a row within the budget, of which all replicas have the same
number; the guard names the engine whose probes are off, and a step without any probe is an error on all
ranks; log-probs, metrics and weights of the step are the same bits as without probes, and so is the step
trained again from its rollouts, whose responses several versions sampled. The correction's statistics by lag
are those of ``objectives``, and together those of the update. Tokens that the policy did not sample are in
none of these numbers. For DP2 and PP2. Not covered: engines
(tests/integration).
"""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rpg_megatron.data.trajectory import NOT_SAMPLED
from rpg_megatron.objectives import rollout_correction
from tests.support.layouts import TEMPERATURE, make_case, make_layout_model, make_masked_batch
from tests.support.ranks import run_ranks

LAYOUTS = {"DP2": {"data": 2}, "PP2": {"pipeline": 2}}
SETTINGS: dict[str, Any] = {
    "training": {"minibatches": 2, "tokens_per_microbatch": 100, "logprob_chunk": 17},
    "rollout": {"prompts_per_step": 4, "temperature": TEMPERATURE, "ahead": 2},
    "correction": {"type": "truncate", "high": 1.5},
    "engine": {"replicas": 3},
    "anchor": {"type": "fixed"},
}
ENGINES = [0, 0, 1, 1, 2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("probes")
    make_layout_model(folder / "model", tied=False)
    batch = make_masked_batch()
    draw = np.random.default_rng(0)
    for i, t in enumerate(batch):
        t.reward, t.group, t.sample = math.sin(i), i // 3, i % 3
        versions = np.sort(draw.integers(3, 6, len(t.response)))  # segments
        t.versions = np.where(t.mask, versions, NOT_SAMPLED).astype(np.int32)
    lengths = [1, 9, 4, 2, 7]
    of = batch[3]
    probes = [
        replace(
            of, group=engine, sample=i, response=of.response[:n], behaviour=of.behaviour[:n], mask=of.mask[:n]
        )
        for i, (engine, n) in enumerate(zip(ENGINES, lengths, strict=True))
    ]
    for t in probes:
        t.versions = np.full_like(t.response, 5)
    (folder / "batch.pkl").write_bytes(pickle.dumps((batch, probes)))
    cases = {
        name: make_case(folder / "model", layout, 0, SETTINGS) | {"name": name}
        for name, layout in LAYOUTS.items()
    }
    for name in cases:
        (folder / name).mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    output = run_ranks("tests.distributed.probes_worker", 2, folder)
    return {name: result["ranks"] for name, result in output.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probes_change_nothing_in_the_step(results: dict, layout: str) -> None:
    for rank in results[layout]:
        assert rank["same"]
        assert rank["replayed"]
        metrics = {k: v for k, v in rank["metrics"].items() if k in rank["wanted"]}
        assert metrics == rank["wanted"]
        more = {key.split("/")[0] for key in rank["metrics"].keys() - rank["wanted"].keys()}
        assert more == {"async", "mismatch", "correction"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_probe_is_scored_in_a_row_of_a_replica(results: dict, layout: str) -> None:
    ranks = results[layout]
    replicas = ranks if layout == "DP2" else ranks[:1]
    assert all(rank["rows"] == replicas[0]["rows"] for rank in ranks) or layout == "DP2"
    assert len({len(rank["rows"]) for rank in ranks}) == 1
    scored = [tuple(probe) for rank in replicas for row in rank["rows"] for probe in row]
    assert sorted(scored) == sorted(zip(ENGINES, range(5), strict=True))
    assert max(len(row) for rank in ranks for row in rank["rows"]) <= 2  # of 100 tokens; each has 41 to 49
    assert all(rank["gap"] < 1e-5 for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_guard_names_the_engine(results: dict, layout: str) -> None:
    first, second = (rank["said"] for rank in results[layout])
    wrong_probe, alone, lacking, off, fine = first
    assert "step 6: engine and trainer disagree" in wrong_probe
    assert "of prompt 3, sample 4 (probe of engine 2): engine" in wrong_probe
    assert second[0] == ""  # rank 0 ends the run
    assert "(probe of engine 2)" in alone  # without a token of the batch
    assert lacking == second[2]
    assert "step 6: no engine answered a probe with weights of version 5" in lacking
    assert off == fine == second[3] == second[4] == ""
    assert results[layout][0]["metrics"]["async/probe_tokens"] == 23
    for rank in results[layout]:  # too few to compare the engines
        assert len(rank["warned"]) == 1
        assert rank["warned"][0].startswith("step 6: the engines' log-probs were not compared")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_correction_by_lag(results: dict, layout: str) -> None:
    sampled = [np.array(t)[:, np.array(t[2]) >= 0] for rank in results[layout] for t in rank["mine"]]
    old, behaviour, versions = np.concatenate(sampled, axis=1)
    expected = rollout_correction(
        torch.tensor(old), torch.tensor(behaviour), torch.zeros(len(old)), kind="truncate", high=1.5
    ).metrics
    row = results[layout][1]["metrics"]
    for key, column in (("ratio_mean", "correction_ratio"), ("hit_frac", "correction_hit")):
        parts = [expected[column].numpy()[versions == 5 - lag] for lag in range(3)]
        for lag, part in enumerate(parts):
            assert row[f"correction/lag_{lag}/{key}"] == pytest.approx(part.mean(), abs=1e-5)
        together = sum(row[f"correction/lag_{lag}/{key}"] * len(part) for lag, part in enumerate(parts))
        assert together / len(old) == pytest.approx(row[f"correction/{key}"], abs=1e-6)
    log_r = np.concatenate([np.subtract(t[0], t[1]) for t in sampled])
    whole = np.exp([np.subtract(t[0], t[1]).sum() for t in sampled])
    for key, w in (("token", np.exp(log_r)), ("sequence", whole)):
        assert row[f"off_policy/ess_{key}"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), abs=1e-5)
    assert row["off_policy/kl_k1"] == pytest.approx(-log_r.mean(), abs=1e-5)
    assert row["off_policy/kl_k3"] == pytest.approx((np.exp(log_r) - 1 - log_r).mean(), abs=1e-5)
    hit = [bool((np.exp(np.subtract(t[0], t[1])) > 1.5).any()) for t in sampled]
    assert row["correction/sequences_hit_frac"] == pytest.approx(np.mean(hit), abs=1e-9)
    assert row["correction/lag_0/hit_frac"] == 0 < row["correction/lag_1/hit_frac"]
    assert "correction/lag_3/ratio_mean" not in row

"""Each rank gets the share of a batch that its data-parallel rank shall have; log-probs come back to rank 0.

Real process groups, cut by Megatron in four layouts. What rank 0 sends and allocates at 512 ranks is measured
and computed by ``benchmarks/batch_scatter.py``.
"""

import json

import pytest

from tests.support.ranks import run_ranks

LAYOUTS = {
    "DP4": {"data": 4},
    "TP2 DP2": {"tensor": 2, "data": 2},
    "PP2 DP2": {"pipeline": 2, "data": 2},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scatter")
    (folder / "layouts.json").write_text(json.dumps(LAYOUTS))
    return run_ranks("tests.distributed.scatter_worker", 4, folder, timeout=120)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_every_rank_has_its_data_ranks_share(results, layout, step):
    found = results[layout]
    for rank, data in enumerate(found["data ranks"]):
        assert found[f"shares {step}"][rank] == found[f"wanted {step}"][data], f"rank {rank}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_come_back_to_their_trajectories(results, layout):
    assert results[layout]["returned 0"]
    assert results[layout]["returned 1"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_megatrons(results, layout):
    ranks = results[layout]["data ranks"]
    assert results[layout]["replicas"] == [
        [r for r, d in enumerate(ranks) if d == data] for data in range(max(ranks) + 1)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_stay_on_rank_0(results, layout):
    first, *others = results[layout]["texts"]
    assert all(first)
    assert not any(text for texts in others for text in texts)

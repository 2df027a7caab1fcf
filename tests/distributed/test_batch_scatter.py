"""Each rank gets its data-parallel rank's share of a batch; leaders fetch, write and compare trajectories.

Real process groups of Megatron's, in four layouts. The leader of each replica fetches its trajectories and
no others; leaders write the step's rollouts in parts and reduce the mismatch, with the results of one process
that has the whole batch. Not covered: what rank 0 sends (tests/unit/test_batch_share).
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
    return run_ranks("tests.distributed.scatter_worker", 4, folder, timeout=240)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_every_rank_has_its_data_ranks_share(results, layout, step):
    found = results[layout]
    for rank, data in enumerate(found["data ranks"]):
        assert found[f"shares {step}"][rank] == found[f"wanted {step}"][data], f"rank {rank}"
    assert found[f"same {step}"]
    assert found[f"order {step}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaders_fetch_each_trajectory_once(results, layout):
    found = results[layout]
    for step in (0, 1):
        fetched = found[f"fetched {step}"]
        assert sum(fetched) == found[f"count {step}"]
        assert [rank for rank, count in enumerate(fetched) if count] == [r[0] for r in found["replicas"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_leader_that_cannot_fetch_fails_all_ranks(results, layout):
    assert all("worker 3 has gone" in said for said in results[layout]["failed fetch"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_megatrons(results, layout):
    ranks = results[layout]["data ranks"]
    assert results[layout]["replicas"] == [
        [r for r, d in enumerate(ranks) if d == data] for data in range(max(ranks) + 1)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_stay_on_leaders(results, layout):
    found = results[layout]
    leaders = [replica[0] for replica in found["replicas"]]
    for rank, texts in enumerate(found["texts"]):
        assert all(bool(text) == (rank in leaders) for text in texts)
    assert all(found["texts"][leader] for leader in leaders)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_leaders_write_the_step_over_what_was_there(results, layout, step):
    assert results[layout][f"written {step}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_cannot_be_written_is_known_to_all(results, layout):
    everyone, file = results[layout]["told 1"]
    assert everyone == [everyone[0]] * 4
    assert len(everyone[0]) == 1
    assert file in everyone[0][0]
    assert results[layout]["again 1"] == []  # said once


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_leaders_find_the_mismatch_of_the_whole_batch(results, layout, step):
    got, wanted = results[layout][f"mismatch {step}"]
    mean = got.pop("mismatch/logp_mean")
    assert mean == pytest.approx(wanted.pop("mismatch/logp_mean"), rel=1e-12)
    assert got == wanted
    message, text = results[layout][f"message {step}"]
    assert message == text

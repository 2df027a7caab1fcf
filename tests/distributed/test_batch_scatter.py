"""Each rank gets its data-parallel rank's share of a batch; leaders fetch, write and compare trajectories.

Real Megatron process groups, in four layouts. The leader of each replica fetches its trajectories and
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
    result = results[layout]
    for rank, data in enumerate(result["data ranks"]):
        assert result[f"shares {step}"][rank] == result[f"wanted {step}"][data], f"rank {rank}"
    assert result[f"same {step}"]
    assert result[f"order {step}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaders_fetch_each_trajectory_once(results, layout):
    result = results[layout]
    for step in (0, 1):
        fetched = result[f"fetched {step}"]
        assert sum(fetched) == result[f"count {step}"]
        assert [rank for rank, count in enumerate(fetched) if count] == [r[0] for r in result["replicas"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_leader_that_cannot_fetch_fails_all_ranks(results, layout):
    assert all("worker 3 has gone" in error for error in results[layout]["failed fetch"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_megatrons(results, layout):
    ranks = results[layout]["data ranks"]
    assert results[layout]["replicas"] == [
        [r for r, d in enumerate(ranks) if d == data] for data in range(max(ranks) + 1)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_stay_on_leaders(results, layout):
    result = results[layout]
    leaders = [replica[0] for replica in result["replicas"]]
    for rank, texts in enumerate(result["texts"]):
        assert all(bool(text) == (rank in leaders) for text in texts)
    assert all(result["texts"][leader] for leader in leaders)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_leaders_write_the_step_over_what_was_there(results, layout, step):
    assert results[layout][f"written {step}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_cannot_be_written_is_known_to_all(results, layout):
    errors, file = results[layout]["told 1"]
    assert errors == [errors[0]] * 4
    assert len(errors[0]) == 1
    assert file in errors[0][0]
    assert results[layout]["again 1"] == []  # said once


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1])
def test_leaders_find_the_mismatch_of_the_whole_batch(results, layout, step):
    actual, expected = results[layout][f"mismatch {step}"]
    mean = actual.pop("mismatch/logp_mean")
    assert mean == pytest.approx(expected.pop("mismatch/logp_mean"), rel=1e-12)
    assert actual == expected
    message, text = results[layout][f"message {step}"]
    assert message == text

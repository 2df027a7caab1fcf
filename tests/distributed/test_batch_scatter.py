"""Each rank gets its data-parallel rank's share of a batch; leaders fetch, write and compare trajectories.

Real Megatron process groups, in four layouts. The leader of each replica fetches its trajectories and
no others; leaders write the step's rollouts in parts and reduce the mismatch, with the results of one process
that has the whole batch. Not covered: what rank 0 sends (tests/unit/test_batch_share).
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state as mpu

from rpg_megatron.config import UserError
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.data import rollout_files
from rpg_megatron.data.batch_index import BatchIndex, index_of
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file, write_rollouts
from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.system.collectives import barrier, gather_objects
from rpg_megatron.training.batch_scatter import BatchScatter, iter_trajectories
from rpg_megatron.training.mismatch import check_mismatch, describe_mismatch, find_gaps, find_worst
from rpg_megatron.training.rollout_saver import RolloutSaver
from tests.support.batches import ListSource, summary_of
from tests.support.ranks import ranks
from tests.support.same_runs import to_row

VERSION = 3
GUARDS = GuardSettings()


def make_batch(count: int, longest: int, seed: int) -> list[Trajectory]:
    """Trajectories of uneven lengths, with distinct numbers; the advantage is not set."""
    draw = np.random.default_rng(seed)
    batch = []
    for i in range(count):
        prompt, response = int(draw.integers(1, 9)), int(draw.integers(1, longest))
        mask = draw.random(response) < (1 if i % 3 else 0.6)  # a third has tokens that were not sampled
        mask[-1] = True
        batch.append(
            Trajectory(
                prompt_id=int(draw.integers(0, 10**6)),
                sample=i % 4,
                group=i // 4,
                prompt=draw.integers(0, 150_000, prompt).astype(np.int32),
                response=draw.integers(0, 150_000, response).astype(np.int32),
                mask=mask,
                behaviour=draw.normal(size=response).astype(np.float32) * mask,
                versions=np.where(
                    mask, draw.integers(VERSION - 1, VERSION + 1, response), NOT_SAMPLED
                ).astype(np.int32),
                finish=("stop", "length")[i % 2],
                text="a text that only the leader needs" * 50,
                reward=float(draw.normal()),
            )
        )
    return batch


def scored(t: Trajectory, seed: int) -> np.ndarray:
    """Stand-in for a trajectory's log-probs; the same on every rank."""
    draw = np.random.default_rng([seed, t.group, t.sample])
    apart = np.where(t.mask, draw.normal(0, 1e-2, len(t.response)), -5)
    return (t.behaviour + apart).astype(np.float32)


def describe(t: Trajectory) -> list[object]:
    """What an update may see of a trajectory."""
    tokens = [t.prompt.tolist(), t.response.tolist(), t.mask.tolist(), t.behaviour.tolist()]
    return [*tokens, t.finish, float(np.float32(t.advantage)), t.prompt_id, t.group, t.sample]


def measure(parallel: dict[str, int], folder: Path) -> dict[str, object]:
    mesh = start_mesh(ParallelSettings(**parallel))
    scatter, saver = BatchScatter(mesh), RolloutSaver(folder, mesh)
    result: dict[str, object] = {}
    for step, count in enumerate((16, 8)):  # a second batch is no remnant of the first
        batch = make_batch(count, 40, step)
        advantages = np.random.default_rng(step).normal(size=count)
        whole = [replace(t, advantage=float(a)) for t, a in zip(batch, advantages, strict=True)]
        for t in whole:
            t.old = t.anchor = scored(t, step)
        index, plan = None, []
        if mesh.rank == 0:
            index = index_of(batch)
            index.ticket += 1000  # of the run
            plan = plan_batches([t.length for t in batch], minibatches=2, data=mesh.data, budget=64)
        source = ListSource(replace(t, group=t.group + 1000) for t in batch) if mesh.leads else None
        share, local = scatter.scatter(plan, index, advantages, source)
        for t in iter_trajectories(share):
            t.old = t.anchor = scored(t, step)
        everyone = gather_objects([[[describe(t) for t in micro] for micro in mini] for mini in share])
        same = (
            {id(t) for t in local} == {id(t) for t in iter_trajectories(share)} if mesh.leads else not local
        )
        fetched = gather_objects(source.fetched if source else 0)
        result |= save(saver, mesh, folder, step, local, whole)
        row, message = check_mismatch(local, VERSION, GUARDS, "float32")
        worst = find_worst(whole, VERSION)
        assert worst
        expected = summary_of(*find_gaps(whole, VERSION))
        text = describe_mismatch(expected, worst, GUARDS, "float32", VERSION + 1)
        rows_and_messages = gather_objects((row, message), tuple[dict[str, float], str | None])
        agree = rows_and_messages == [(row, message)] * mesh.world
        if mesh.rank == 0:
            parts = plan_batches([t.length for t in batch], minibatches=2, data=mesh.data, budget=64)
            result |= {
                f"shares {step}": everyone,
                f"wanted {step}": [
                    [[[describe(whole[i]) for i in micro] for micro in mini] for mini in p] for p in parts
                ],
                f"fetched {step}": fetched,
                f"count {step}": count,
                f"mismatch {step}": [row, expected],
                f"message {step}": [message, text],
            }
        result[f"same {step}"] = all(gather_objects(same)) and agree
        result[f"order {step}"] = all(
            gather_objects(sorted((t.group, t.sample) for t in local) == [(t.group, t.sample) for t in local])
        )
    result["data ranks"] = gather_objects(mpu.get_data_parallel_rank())
    result["replicas"] = [mesh.replica(d) for d in range(mesh.data)]
    result["texts"] = gather_objects([t.text for t in iter_trajectories(share)])
    result["failed fetch"] = gather_objects(fail(scatter, mesh, plan, index, advantages, source))
    mpu.destroy_model_parallel()
    return result


@contextmanager
def slow_writes() -> Iterator[None]:
    """Delays this rank's part: a rank that does not wait for it finds it missing."""
    write = rollout_files.write_rollouts

    def slow(file: Path, trajectories: Sequence[Trajectory], *, routes: bool = False) -> None:
        time.sleep(0.3)
        write(file, trajectories, routes=routes)

    rollout_files.write_rollouts = slow
    yield
    rollout_files.write_rollouts = write


def save(
    saver: RolloutSaver, mesh: Mesh, folder: Path, step: int, local: list[Trajectory], whole: list[Trajectory]
) -> dict[str, object]:
    """Write the step over another layout's files; then again, when one leader cannot write."""
    file = rollouts_file(folder, step)
    if mesh.rank == 0:
        write_rollouts(file, whole[:1])
        saver.prepare(step)
    barrier()
    last = mesh.rank == mesh.replica(mesh.data - 1)[0]
    with slow_writes() if last else nullcontext():
        saver.start(step, local, routes=False)
        failures = saver.finish()
    read = [to_row(t) for t in read_rollouts(file)] if mesh.rank == 0 else []
    barrier()
    if mesh.rank == 0:
        saver.prepare(step)
    barrier()
    blocked = file if mesh.data == 1 else file / f"part_{mesh.data - 1:05d}_of_{mesh.data:05d}.parquet"
    if last:
        blocked.mkdir(parents=True)
    barrier()
    saver.start(step, local, routes=False)
    errors = gather_objects(saver.finish())
    return {
        f"written {step}": failures == [] and read == [to_row(t) for t in whole],
        f"told {step}": [errors, str(blocked)],
        f"again {step}": saver.finish(),
    }


def fail(
    scatter: BatchScatter,
    mesh: Mesh,
    plan: list,
    index: BatchIndex | None,
    advantages: np.ndarray,
    source: ListSource | None,
) -> str:
    """Each rank's error when the last leader's source has lost its trajectories."""
    if mesh.rank == mesh.replica(mesh.data - 1)[0]:

        class Lost:
            def fetch(self, worker: object, ticket: object, sample: object) -> list[Trajectory]:
                raise UserError("worker 3 has gone")

        source = Lost()  # type: ignore[assignment]
    try:
        scatter.scatter(plan, index, advantages, source)
    except UserError as e:
        return str(e)
    return ""


@ranks(4)
def measure_all(folder: Path, layouts: dict[str, dict[str, int]]) -> dict[str, Any]:
    results = {}
    for name, parallel in layouts.items():
        run = folder / name
        run.mkdir(exist_ok=True)
        results[name] = measure(parallel, run)
    return json.loads(json.dumps(results))  # as those that were gathered


LAYOUTS = {
    "DP4": {"data": 4},
    "TP2 DP2": {"tensor": 2, "data": 2},
    "PP2 DP2": {"pipeline": 2, "data": 2},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return measure_all(tmp_path_factory.mktemp("scatter"), LAYOUTS)


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

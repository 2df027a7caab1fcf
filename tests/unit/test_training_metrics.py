"""The mismatch guard fires when it must and only then; a journal is read back bit-equal, or is not there.

Not covered: the loop itself (tests/integration), leaders of several replicas (tests/distributed).
"""

import io
import json
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpg_megatron.commands.replay.compare_steps import Gaps, measure_gaps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.config.rollout import RolloutFilesSettings
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.rollout_files import (
    iter_rollouts,
    list_rollouts,
    part_file,
    prune_rollouts,
    read_rollouts,
    remove_rollouts,
    rollouts_complete,
    rollouts_file,
    step_of,
    write_rollouts,
)
from rpg_megatron.data.trajectory import NO_ROUTES, NOT_SAMPLED, Trajectory
from rpg_megatron.rollout.batch_metrics import batch_metrics, index_of_groups
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.groups import GroupTask, scores_of
from rpg_megatron.training.best_checkpoints import BestCheckpoints
from rpg_megatron.training.checkpoint_saver import SaveResult
from rpg_megatron.training.metrics import MetricsWriter
from rpg_megatron.training.mismatch import (
    describe_mismatch,
    find_gaps,
    find_worst,
    out_of_bounds,
    summarise,
)
from rpg_megatron.training.run import RankRun
from tests.support.batches import summary_of
from tests.support.trajectories import make_trajectory


def trajectory(gap: list[float], versions: list[int]) -> Trajectory:
    n = len(gap)
    old = np.linspace(-3, -0.1, n).astype(np.float32)
    numbers = {"prompt_id": 4, "sample": 1, "group": 3, "reward": 1.0, "correct": True, "advantage": 0.1}
    return make_trajectory(
        [5, 6],
        n,
        **numbers,
        behaviour=old + np.array(gap, np.float32),
        versions=np.array(versions, np.int32),
        text="1 + 1 = 2\nAnswer: 2 \u2713\u2028\x85",  # a text may hold any separator of lines
        old=old,
        anchor=old.copy(),
        parts={"correctness": 1.0, "overlong": -0.25},
        extracted="2",
        reason="same number or text",
    )


def compare_logprobs(batch: list[Trajectory], version: int) -> dict[str, float]:
    return summarise(*find_gaps(batch, version))


def message_of(batch: list[Trajectory], version: int) -> str:
    """The guard's message for a batch that is out of bounds."""
    row, worst = compare_logprobs(batch, version), find_worst(batch, version)
    assert out_of_bounds(row, GuardSettings(), "float32")
    assert worst
    return describe_mismatch(row, worst, GuardSettings(), "float32", step=version + 1)


def test_only_tokens_of_the_present_weights_count() -> None:
    row = compare_logprobs([trajectory([0.5, 1e-5, 2e-5], [6, 7, 7])], version=7)
    assert row["mismatch/tokens"] == 2
    assert row["mismatch/stale_tokens"] == 1
    assert row["mismatch/logp_max"] == pytest.approx(2e-5, rel=0.05)


def test_interrupted_responses_with_routes_are_not_compared() -> None:
    """The trainer has the older routes for the tokens before the update; the engine computed them again."""
    routes = np.zeros((5, 2, 1), np.uint8)
    mixed = replace(trajectory([0.5, 0.5, 2e-5, 0.5], [6, 6, 7, 7]), routes=routes)
    uninterrupted = replace(with_others(trajectory([1e-5, 2e-5, 3e-5], [7, 7, 7]), [1]), routes=routes)
    row = compare_logprobs([mixed, uninterrupted], version=7)
    assert (row["mismatch/tokens"], row["mismatch/stale_tokens"]) == (3, 4)
    assert row["mismatch/logp_max"] == pytest.approx(3e-5, rel=0.05)
    worst = find_worst([mixed, uninterrupted], 7)
    assert worst.gap == pytest.approx(3e-5, rel=0.05)
    assert compare_logprobs([replace(mixed, routes=NO_ROUTES)], version=7)["mismatch/tokens"] == 2


def test_groups_without_a_signal_are_counted() -> None:
    groups = [
        [(1.0, True), (1.0, True)],
        [(1.0, True), (0.6, True)],  # all right, but a penalty tells them apart
        [(-1.0, False), (-1.0, False)],
        [(0.3, True), (-1.0, False)],
    ]
    batch = [
        Group(
            GroupTask(number, 0, np.zeros(1, np.int32), "", len(group), 0, 1, 7),
            scores_of(
                [replace(trajectory([0.0], [7]), reward=reward, correct=correct) for reward, correct in group]
            ),
        )
        for number, group in enumerate(groups)
    ]
    row = batch_metrics(batch)
    assert (row["groups/all_right"], row["groups/all_wrong"]) == (0.5, 0.25)
    assert row["groups/equal_rewards"] == 0.5


def with_others(t: Trajectory, positions: list[int], version: int = NOT_SAMPLED) -> Trajectory:
    """Insert tokens that the policy did not sample before these positions of the response."""

    def insert(values: np.ndarray, value: float) -> np.ndarray:
        return np.insert(values, positions, value)

    return replace(
        t,
        response=insert(t.response, 9),
        behaviour=insert(t.behaviour, 0),
        versions=insert(t.versions, version),
        old=insert(t.old, [np.nan, -1e30, 7][len(positions) % 3]),
        mask=insert(t.mask, False),
    )


@pytest.mark.parametrize("version", [NOT_SAMPLED, 7])
def test_tokens_of_others_are_in_no_comparison(version: int) -> None:
    """Whatever their log-probs and versions."""
    batch = [trajectory([2e-3, 0.5, 1e-5], [7, 6, 7]), trajectory([1e-4, 2e-2], [7, 7])]
    longer = [with_others(batch[0], [0, 0, 1], version), with_others(batch[1], [0, 1, 1, 2], version)]
    assert [t.sampled for t in longer] == [3, 2]
    gaps, expected = find_gaps(longer, 7), find_gaps(batch, 7)
    assert np.array_equal(gaps[0], expected[0])
    assert gaps[1] == expected[1] == 1
    assert find_worst(longer, 7) == replace(find_worst(batch, 7), position=4, length=6)
    assert "worst at token 4 of 6" in message_of(longer, 7)


def test_scores_count_what_the_policy_sampled() -> None:
    plain = trajectory([0.0] * 5, [6, 6, 7, 7, 7])
    group = [plain, with_others(plain, [0, 0, 1, 2, 4, 5, 5]), with_others(plain, [3])]
    group = [replace(t, sample=number) for number, t in enumerate(group)]
    scores = scores_of(group)
    assert scores.lengths == [5, 5, 5]
    assert scores.rows == [(0, 0, 2, 5, 5, -1), (1, 0, 2, 12, 5, -1), (2, 0, 2, 6, 5, -1)]
    assert scores.versions == {6: 6, 7: 9}
    assert (scores.segments, scores.mixed) == (6, 3)
    # The prompt, and the tokens before the first one of the second version.
    assert scores.recomputed == 3 * 2 + 2 + 6 + 2
    assert scores_of([plain]).rows == []
    none = scores_of([replace(plain, mask=np.zeros(5, bool))])
    assert (none.lengths, none.rows, none.versions) == ([0], [(1, 0, 2, 5, 0, -1)], {})

    routed = [replace(plain, routes=np.zeros((6, 1, 1), np.uint8), sample=i) for i in range(2)]
    assert scores_of(routed).rows == []
    later = [routed[0], replace(routed[1], versions=routed[1].versions + 1)]  # begun after a sync
    assert [size.routed_by for size in scores_of(later).rows] == [6, 7]
    assert index_of(later).routed_by.tolist() == [6, 7]

    groups = [
        Group(GroupTask(number, 0, plain.prompt, "", 3, 0, 1, 7), scores)
        for number, scores in enumerate((scores, scores_of([replace(plain, sample=i) for i in range(3)])))
    ]
    row = batch_metrics(groups)
    assert (row["response/length_mean"], row["response/length_max"]) == (5, 5)
    index = index_of_groups(groups, lambda prompt_id: 0)
    assert index.response_length.tolist() == [5, 12, 6, 5, 5, 5]
    assert index.sampled.tolist() == [5] * 6
    local = index_of([replace(t, group=i // 3, sample=i % 3) for i, t in enumerate([*group, *[plain] * 3])])
    for name, values in vars(local).items():
        assert np.array_equal(getattr(index, name), values), name


@pytest.mark.parametrize("gap", [[0.0, 2e-3, 0.0], [0.0, float("nan"), 0.0]])
def test_guard_fires_and_names_the_token(gap: list[float]) -> None:
    batch = [trajectory([0.0] * 3, [7] * 3), trajectory(gap, [7] * 3)]
    row, message = compare_logprobs(batch, 7), message_of(batch, 7)
    assert re.match(r"step 8: .*worst at token 1 of 3 of prompt 4.*rpg-megatron audit RUN to find", message)
    assert out_of_bounds(row, GuardSettings(mismatch="warn"), "float32")
    assert not out_of_bounds(row, GuardSettings(mismatch="off"), "float32")


def test_guard_names_a_token_of_the_present_weights() -> None:
    batch = [trajectory([2.0, 0.0, 0.01], [6, 7, 7])]
    assert "worst at token 2 of 3" in message_of(batch, 7)


def test_of_equal_gaps_the_first_is_named() -> None:
    batch = [trajectory([0.0, 0.01], [7, 7]) for _ in range(4)]
    for number, t in enumerate(batch):
        t.group, t.sample, t.prompt_id = number // 2, number % 2, number
        t.old = t.anchor = np.array([-1, -1], np.float32)
        t.behaviour = np.array([-1, -1.5 if number else -1.25], np.float32)
    assert "of prompt 1, sample 1" in message_of(batch, 7)
    assert max(w for t in reversed(batch) if (w := find_worst([t], 7))) == find_worst(batch, 7)


@pytest.mark.parametrize(("excess", "gap"), [(0.1, [0.0, 0.02, 2e-3]), (math.inf, [0.0, 0.0, 2e-3])])
def test_what_top_p_explains_is_no_mismatch(excess: float, gap: list[float]) -> None:
    """The engine's log-prob may exceed the trainer's by minus the log of the kept mass, not fall below it."""
    batch = [trajectory([0.08, 0.12, -2e-3], [7] * 3)]
    gaps, _ = find_gaps(batch, 7, excess)
    assert gaps.tolist() == pytest.approx(gap, abs=1e-6)
    assert not np.signbit(gaps).any()  # they are sorted by their bits
    worst = find_worst(batch, 7, excess=excess)
    assert worst
    assert worst.position == int(np.argmax(gap))


def test_guard_is_quiet_within_bounds() -> None:
    batch = [trajectory([1e-5, 2e-5, 0.0], [7] * 3)]
    assert not out_of_bounds(compare_logprobs(batch, 7), GuardSettings(), "float32")


DRAW = np.random.default_rng(0)
GAPS = {
    "none": np.zeros(0),
    "one": np.array([0.25]),
    "two": np.array([0.5, 0.0]),
    "zeros": np.zeros(1000),
    "ties": np.repeat([0.0, 1e-7, 0.5], [500, 490, 10]),
    "a tie at the place": np.repeat([1e-5, 2e-5, 3e-5], [50, 50, 1]),
    "one bin": np.nextafter(np.float32(1), np.float32(2)) + np.arange(300) * 2.0**-23,
    "neighbouring bins": np.float32(1) + np.arange(-150, 151) * 2.0**-23,
    "all sizes": 10.0 ** DRAW.uniform(-44, 38, 5000),
    "usual": np.abs(DRAW.normal(0, 1e-5, 100_001)),
    "infinite": np.append(np.ones(50), np.inf),
    "NaN": np.append(np.ones(500), [np.nan, 2.0]),
    "more than a chunk": np.abs(DRAW.normal(0, 1e-5, 2**20 + 77)),
}


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("leaders", [1, 3])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_leaders_find_the_quantile_of_all_gaps(name: str, leaders: int) -> None:
    """From summed counts; bit-equal to numpy's quantile of all gaps."""
    gaps = GAPS[name].astype(np.float32)
    shards = np.array_split(np.random.default_rng(1).permutation(gaps), leaders)
    table: list[np.ndarray] = []
    barrier, lock = threading.Barrier(leaders), threading.Lock()

    def add_up(values: np.ndarray) -> np.ndarray:
        with lock:
            table.append(values)
        barrier.wait(60)
        total: np.ndarray = np.sum(table, axis=0)
        if barrier.wait(60) == 0:
            table.clear()
        barrier.wait(60)
        return total

    with ThreadPoolExecutor(leaders) as pool:
        rows = list(pool.map(lambda shard: summarise(shard, 2, add_up), shards))
        expected = summary_of(np.concatenate(shards), 2 * leaders)
    mean, within = expected.pop("mismatch/logp_mean", 0.0), 1e-12 if leaders > 1 else 0.0
    for row in rows:
        assert row.pop("mismatch/logp_mean", 0.0) == pytest.approx(mean, rel=within, abs=0, nan_ok=True)
        assert repr(row) == repr(expected)


def scored(number: int) -> Trajectory:
    """A trajectory with something in every field."""
    t = trajectory([0.1, 1e-7, 0.3][: 1 + number % 3], [7] * (1 + number % 3))
    t.text = "a line\u2028and another\n\x00" * (number % 2)
    t.parts = {"correctness": 1 / 3, "format": -0.0} if number % 2 else {}
    t.extracted = None if number % 2 else "1/3"
    t.reward, t.seed, t.advantage, t.prompt_id = 1 / 3, 2**62 - number, -1e-300, 2**40 + number
    t.ticket = 2**33 + number
    t.old = np.array(
        [np.nextafter(np.float32(-1), np.float32(0)), np.nan, -0.0][: len(t.response)], np.float32
    )
    t.anchor = [t.old, t.old.copy(), -t.old, t.old[:0]][number % 4]
    if number % 5 in (2, 4):
        t.mask = np.arange(len(t.response)) % 2 == number % 2  # of a single token: all of it, or nothing
    return t


def assert_same(actual: list[Trajectory], expected: list[Trajectory]) -> None:
    for a, b in zip(actual, expected, strict=True):
        for name, value in vars(b).items():
            if isinstance(value, np.ndarray):
                assert getattr(a, name).dtype == value.dtype
                assert getattr(a, name).tobytes() == value.tobytes()
                assert getattr(a, name).flags.writeable
            else:
                assert repr(getattr(a, name)) == repr(value)


@pytest.mark.parametrize("count", [0, 1, 2, 150])
def test_journal_round_trip(tmp_path: Path, count: int) -> None:
    batch = [scored(number) for number in range(count)]
    file = rollouts_file(tmp_path, 1)
    write_rollouts(file, batch)
    assert_same(read_rollouts(file), batch)
    assert [p.name for p in file.parent.iterdir()] == ["step_000001.parquet"]
    assert list_rollouts(tmp_path) == [file]
    table = pq.read_table(file)
    assert table.num_rows == count  # other tools see a plain Parquet file
    masks = [None if t.mask.all() else t.mask.tolist() for t in batch]
    assert table["mask"].to_pylist() == masks
    assert count < 150 or all(m in masks for m in ([True, False, True], [False, True], [False], None))


def write_parts(run: Path, shards: list[list[Trajectory]]) -> Path:
    file = rollouts_file(run, 1)
    for number, shard in enumerate(shards):
        write_rollouts(part_file(file, number, len(shards)), shard)
    return file


@pytest.mark.parametrize("parts", [2, 3, 70])
def test_a_journal_in_parts_is_read_in_batch_order(tmp_path: Path, parts: int) -> None:
    batch = [replace(scored(number), group=number // 4, sample=number % 4) for number in range(150)]
    place = np.random.default_rng(parts).integers(0, parts, len(batch))
    shards = [[t for t, p in zip(batch, place, strict=True) if p == number] for number in range(parts)]
    file = write_parts(tmp_path, shards)
    assert_same(read_rollouts(file), batch)
    assert list_rollouts(tmp_path) == [file]
    assert pq.read_table(file).num_rows == len(batch)  # other tools see one data set
    assert sum(len(pd.read_parquet(f)) for f in file.iterdir()) == len(pd.read_parquet(file)) == len(batch)


def test_a_journal_in_parts_is_streamed(tmp_path: Path) -> None:
    """The first trajectories come before the rest is read, which is damaged here."""
    batch = [replace(scored(number), group=number, sample=0) for number in range(600)]
    file = write_parts(tmp_path, [batch[::2], batch[1::2]])
    part = part_file(file, 1, 2)
    metadata = pq.ParquetFile(part).metadata
    column = metadata.row_group(metadata.num_row_groups - 1).column(0)
    end = column.data_page_offset + column.total_compressed_size
    content = part.read_bytes()
    part.write_bytes(content[: end - 4] + b"xxxx" + content[end:])
    rows = iter_rollouts(file)
    assert_same([next(rows) for _ in range(50)], batch[:50])
    with pytest.raises(UserError, match=r"part_00001_of_00002\.parquet: damaged"):
        list(rows)


def test_a_journal_without_all_its_parts_is_none(tmp_path: Path) -> None:
    batch = [replace(scored(number), group=number) for number in range(8)]
    file = write_parts(tmp_path, [batch[:4], batch[4:6], batch[6:]])
    part_file(file, 1, 3).unlink()
    assert not rollouts_complete(file)
    assert list_rollouts(tmp_path) == []
    with pytest.raises(
        UserError, match=r"step_000001\.parquet/part_00001_of_00003\.parquet: missing; choose"
    ):
        read_rollouts(file)
    for part in file.iterdir():
        part.unlink()
    assert list_rollouts(tmp_path) == []  # killed before its first part
    with pytest.raises(UserError, match="missing"):
        read_rollouts(file)


def test_leftovers_of_a_step_are_removed(tmp_path: Path) -> None:
    """As one file, or as any number of parts."""
    file = rollouts_file(tmp_path, 1)
    other = rollouts_file(tmp_path, 11)
    write_rollouts(other, [scored(1)])
    for shards in (1, 2, 4):
        write_parts(tmp_path, [[scored(1)]] * shards)
        (file.parent / f".{file.name}.part").touch()
        remove_rollouts(file)
        assert [f.name for f in file.parent.iterdir()] == [other.name]
    remove_rollouts(file)


@pytest.mark.parametrize("column", ["ticket", "mask"])
def test_journals_without_a_column(tmp_path: Path, column: str) -> None:
    """Read in full, with ticket 0 and every token sampled; also beside files that have the column."""
    batch = [scored(number) for number in (0, 1, 3, 4)]
    file = rollouts_file(tmp_path, 1)
    write_rollouts(rollouts_file(tmp_path, 2), batch)
    pq.write_table(pq.read_table(rollouts_file(tmp_path, 2)).drop_columns([column]), file)
    columns = pd.concat([pd.read_parquet(f) for f in list_rollouts(tmp_path)])[column]
    assert columns.isna().tolist() == [True] * 4 + [column == "mask" and t.mask.all() for t in batch]
    assert not all(t.mask.all() for t in batch)
    assert_same(
        read_rollouts(file),
        [
            replace(t, ticket=0) if column == "ticket" else replace(t, mask=np.ones(len(t.response), bool))
            for t in batch
        ],
    )


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    file = rollouts_file(tmp_path, 1)
    write_rollouts(file, [scored(number) for number in range(100)])
    content = file.read_bytes()
    for damaged in (b"", content[:300], content[:2000] + b"x" + content[2001:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"step_000001\.parquet: damaged"):
            read_rollouts(file)
    pq.write_table(pq.read_table(io.BytesIO(content)).drop_columns(["old"]), file)
    with pytest.raises(UserError, match=r"damaged .*old"):
        read_rollouts(file)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True, None, False], "mask has nulls in its lists"),
        ([True, False], "mask of group 3 does not have the length of the response"),
        ([], "mask of group 3 does not have the length of the response"),
    ],
)
def test_a_mask_that_is_none_is_damage(tmp_path: Path, mask: list[bool | None], message: str) -> None:
    file = rollouts_file(tmp_path, 1)
    write_rollouts(file, [trajectory([0.0] * 3, [7] * 3)])
    table = pq.read_table(file)
    column = pa.array([mask], pa.list_(pa.bool_()))
    pq.write_table(table.set_column(table.schema.get_field_index("mask"), "mask", column), file)
    with pytest.raises(UserError, match=rf"step_000001\.parquet: damaged \({message}\); choose"):
        read_rollouts(file)


def test_a_replay_compares_what_the_policy_sampled() -> None:
    t = with_others(trajectory([0.0] * 3, [7] * 3), [0, 2])
    t.anchor = t.old.copy()
    replayed = replace(t, old=np.where(t.mask, t.old, 5), anchor=np.where(t.mask, t.anchor, np.nan))
    assert measure_gaps([t], [replayed]) == Gaps(tokens=3, old=0, anchor=0, advantage=0)
    replayed.old[1] += 0.25
    assert measure_gaps([t], [replayed]).old == 0.25
    assert measure_gaps([t], [replace(replayed, old=t.old[1:])]).old == math.inf
    assert measure_gaps([t], [replace(replayed, old=t.old[:0], advantage=0.6)]) == Gaps(3, math.inf, 0, 0.5)


def test_a_journal_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with pytest.raises(FileNotFoundError):  # a removed run folder is not created again
        write_rollouts(tmp_path / "gone" / "rollouts" / "step_000001.parquet", [])
    assert not (tmp_path / "gone").exists()
    (folder / "step_000001.parquet").mkdir(parents=True)  # in the way
    with pytest.raises(IsADirectoryError):
        write_rollouts(folder / "step_000001.parquet", [trajectory([0.0], [1])])
    assert [f.name for f in folder.iterdir()] == ["step_000001.parquet"]


def test_metrics_that_nobody_will_find_end_the_run(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 0, "reward/mean": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "reward/mean": 0.5}
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl was removed"):
        writer.write({"step": 1})
    writer.close()


def test_rows_are_on_the_disk_before_a_checkpoint_counts_them(tmp_path, monkeypatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))))
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1})
    assert writer.sync_to_disk() == len('{"step": 1}\n')
    assert synced == [tmp_path / "metrics.jsonl"]
    writer.close()


@pytest.mark.parametrize("problem", ["No space left on device", None])
def test_a_failed_last_checkpoint_is_in_summary_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    """The end of a rank's run, with what it calls replaced."""
    monkeypatch.setattr("rpg_megatron.training.run.barrier", lambda: None)
    run = object.__new__(RankRun)
    sections = {"export": {"enabled": False}, "checkpoint": {"every": 2}}
    run.settings = Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)
    run.steps = run._step = 4
    run._saved_step, run._save_problem, run._run_dir, run._started = 2, "", tmp_path, time.monotonic()
    run.summary = {"rates": [1.0]}
    run.mesh = SimpleNamespace(rank=0)
    run.events = SimpleNamespace(warn=lambda text: None)
    results = [SaveResult(4, tmp_path / "step_000004", 1.0, problem)]
    run._best = BestCheckpoints(run.settings, tmp_path)
    run._saver = SimpleNamespace(wait=lambda timeout=None: True, pop_results=lambda: results)
    run._metrics = MetricsWriter(tmp_path)
    run.export()
    run._metrics.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.get("unsaved") == problem
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == ([{"step": 4, "checkpoint/failed": 1.0}] if problem else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_closes_what_it_has_opened(rank: int) -> None:
    """Metrics are rank 0's: trackers get their last rows as it closes them."""
    closed: list[str] = []

    def part(name: str) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: closed.append(name))

    run = object.__new__(RankRun)
    run.mesh = SimpleNamespace(rank=rank)
    run._rollouts = SimpleNamespace(finish=lambda: [])
    run._saver = SimpleNamespace(wait=lambda timeout=None: True, pop_results=list)
    run.weight_sync, run._source = part("sync"), part("source") if rank == 0 else None
    run._efficiency, run.events = part("efficiency"), part("events")
    if rank == 0:
        run._metrics = part("metrics")
    run.close()
    own = ["sync", "source", "efficiency", "metrics", "events"]
    assert closed == (own if rank == 0 else ["sync", "efficiency", "events"])


@pytest.mark.parametrize(
    ("keep", "newest", "remaining"),
    [
        (None, 6, [1, 2, 3, 4, 5, 6]),
        (2, 6, [5, 6]),
        (2, 4, [5, 6]),
        (2, 3, [4, 5, 6]),  # step 4 has no checkpoint yet
        (2, 0, [1, 2, 3, 4, 5, 6]),
        (9, 6, [1, 2, 3, 4, 5, 6]),
        ("0.5 kB", 6, [6]),  # the newest stays, whatever its size
        ("{three}B", 6, [4, 5, 6]),
        ("{three}B", 2, [3, 4, 5, 6]),
        ("1GiB", 6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_old_rollouts_are_pruned_once_a_checkpoint_is_complete(
    tmp_path: Path, keep: int | str | None, newest: int, remaining: list[int]
) -> None:
    sizes = []
    for step in range(1, 7):
        file = rollouts_file(tmp_path, step)
        files = [file] if step % 2 else [part_file(file, part, 2) for part in range(2)]
        for each in files:
            write_rollouts(each, [scored(step)])
        sizes.append(sum(each.stat().st_size for each in files))
    other = tmp_path / "rollouts" / "engines.jsonl"
    other.touch()
    if isinstance(keep, str):
        keep = keep.format(three=sum(sizes[-3:]))
    prune_rollouts(tmp_path, RolloutFilesSettings(keep=keep), newest)
    assert [step_of(file) for file in list_rollouts(tmp_path)] == remaining
    assert other.exists()

"""The mismatch guard fires when it must and only then; a journal gives back the same bits, or is not there.

Not covered: the loop itself (tests/integration).
"""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.data.rollout_files import list_rollouts, read_rollouts, rollouts_file, write_rollouts
from rpg_megatron.data.trajectory import Trajectory, to_row
from rpg_megatron.rollout.sampler import batch_metrics
from rpg_megatron.training.checkpoint_saver import SaveResult
from rpg_megatron.training.metrics import MetricsWriter, compare_logprobs, guard_mismatch
from rpg_megatron.training.run import RankRun


def trajectory(gap: list[float], versions: list[int]) -> Trajectory:
    n = len(gap)
    old = np.linspace(-3, -0.1, n).astype(np.float32)
    return Trajectory(
        prompt_id=4,
        sample=1,
        prompt=np.array([5, 6], np.int32),
        response=np.arange(n, dtype=np.int32),
        behaviour=old + np.array(gap, np.float32),
        versions=np.array(versions, np.int32),
        finish="stop",
        text="1 + 1 = 2\nAnswer: 2 \u2713\u2028\x85",  # a text may hold any separator of lines
        reward=1.0,
        correct=True,
        old=old,
        anchor=old.copy(),
        group=3,
        advantage=0.1,
        parts={"correctness": 1.0, "overlong": -0.25},
        extracted="2",
        reason="same number or text",
    )


def test_only_tokens_of_the_present_weights_count() -> None:
    row = compare_logprobs([trajectory([0.5, 1e-5, 2e-5], [6, 7, 7])], version=7)
    assert row["mismatch/tokens"] == 2
    assert row["mismatch/stale_tokens"] == 1
    assert row["mismatch/logp_max"] == pytest.approx(2e-5, rel=0.05)


def test_groups_without_a_signal_are_counted() -> None:
    groups = [
        [(1.0, True), (1.0, True)],
        [(1.0, True), (0.6, True)],  # all right, but a penalty tells them apart
        [(-1.0, False), (-1.0, False)],
        [(0.3, True), (-1.0, False)],
    ]
    batch = [
        replace(trajectory([0.0], [7]), group=number, reward=reward, correct=correct)
        for number, group in enumerate(groups)
        for reward, correct in group
    ]
    row = batch_metrics(batch)
    assert (row["groups/all_right"], row["groups/all_wrong"]) == (0.5, 0.25)
    assert row["groups/equal_rewards"] == 0.5


@pytest.mark.parametrize("gap", [[0.0, 2e-3, 0.0], [0.0, float("nan"), 0.0]])
def test_guard_stops_and_names_the_token(gap: list[float]) -> None:
    batch = [trajectory([0.0] * 3, [7] * 3), trajectory(gap, [7] * 3)]
    row = compare_logprobs(batch, version=7)
    with pytest.raises(UserError, match=r"worst at token 1 of 3 of prompt 4.*rpg-megatron audit RUN to find"):
        guard_mismatch(row, batch, GuardSettings(), "float32", version=7, step=8)
    assert guard_mismatch(row, batch, GuardSettings(mismatch="warn"), "float32", version=7, step=8)
    assert guard_mismatch(row, batch, GuardSettings(mismatch="off"), "float32", version=7, step=8) is None


def test_guard_names_a_token_of_the_present_weights() -> None:
    batch = [trajectory([2.0, 0.0, 0.01], [6, 7, 7])]
    with pytest.raises(UserError, match="worst at token 2 of 3"):
        guard_mismatch(compare_logprobs(batch, 7), batch, GuardSettings(), "float32", version=7, step=8)


def test_guard_is_quiet_within_bounds() -> None:
    batch = [trajectory([1e-5, 2e-5, 0.0], [7] * 3)]
    row = compare_logprobs(batch, 7)
    assert guard_mismatch(row, batch, GuardSettings(), "float32", version=7, step=8) is None


def scored(number: int) -> Trajectory:
    """A trajectory with something in every field."""
    t = trajectory([0.1, 1e-7, 0.3][: 1 + number % 3], [7] * (1 + number % 3))
    t.text = "a line\u2028and another\n\x00" * (number % 2)
    t.parts = {"correctness": 1 / 3, "format": -0.0} if number % 2 else {}
    t.extracted = None if number % 2 else "1/3"
    t.reward, t.seed, t.advantage, t.prompt_id = 1 / 3, 2**62 - number, -1e-300, 2**40 + number
    t.old = np.array(
        [np.nextafter(np.float32(-1), np.float32(0)), np.nan, -0.0][: len(t.response)], np.float32
    )
    t.anchor = [t.old, t.old.copy(), -t.old, t.old[:0]][number % 4]
    return t


def assert_same(got: list[Trajectory], wanted: list[Trajectory]) -> None:
    for a, b in zip(got, wanted, strict=True):
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
    assert pq.read_table(file).num_rows == count  # a plain Parquet file to others


def test_journals_of_earlier_versions(tmp_path: Path) -> None:
    """One JSON object a line, compressed by zstd; found and read, and damage noticed."""
    batch = [scored(number) for number in (0, 1, 3, 4)]  # without a negative NaN, which JSON does not know
    lines = b"".join(json.dumps(to_row(t), ensure_ascii=False).encode() + b"\n" for t in batch)
    older = tmp_path / "rollouts" / "step_000002.jsonl.zst"
    older.parent.mkdir()
    older.write_bytes(zstandard.compress(lines))
    assert rollouts_file(tmp_path, 2) == older
    assert list_rollouts(tmp_path) == [older]
    assert_same(read_rollouts(older), batch)
    older.write_bytes(zstandard.compress(lines)[:-20])
    with pytest.raises(UserError, match=r"step_000002\.jsonl\.zst: truncated"):
        read_rollouts(older)
    older.write_bytes(zstandard.compress(b"[]\n"))
    with pytest.raises(UserError, match=r"step_000002\.jsonl\.zst: damaged"):
        read_rollouts(older)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    file = rollouts_file(tmp_path, 1)
    write_rollouts(file, [scored(number) for number in range(100)])
    whole = file.read_bytes()
    for damaged in (b"", whole[:300], whole[:2000] + b"x" + whole[2001:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"step_000001\.parquet: damaged"):
            read_rollouts(file)
    pq.write_table(pq.read_table(io.BytesIO(whole)).drop_columns(["old"]), file)
    with pytest.raises(UserError, match=r"damaged .*old"):
        read_rollouts(file)


def test_a_journal_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with pytest.raises(FileNotFoundError):  # the run's folder has been removed, and is not made anew
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
    with pytest.raises(UserError, match=r"metrics.jsonl has been removed"):
        writer.write({"step": 1})
    writer.close()


def test_rows_are_on_the_disk_before_a_checkpoint_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))))
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1})
    assert writer.sync_to_disk() == len('{"step": 1}\n')
    assert synced == [tmp_path / "metrics.jsonl"]
    writer.close()


@pytest.mark.parametrize("problem", ["No space left on device", None])
def test_a_last_checkpoint_that_is_not_written_is_in_summary_and_metrics(
    tmp_path: Path, problem: str | None
) -> None:
    """The end of a rank's run, with what it calls replaced."""
    run = object.__new__(RankRun)
    sections = {"export": {"enabled": False}, "checkpoint": {"every": 2}}
    run.settings = Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)
    run.steps = run._step = 4
    run._saved_step, run._save_problem, run._run_dir, run._started = 2, "", tmp_path, time.monotonic()
    run._summary = {"rates": [1.0]}
    run.mesh = SimpleNamespace(rank=0)
    run.events = SimpleNamespace(send=lambda event: None)
    results = [SaveResult(4, tmp_path / "step_000004", 1.0, problem)]
    run._saver = SimpleNamespace(wait=lambda timeout=None: True, outcomes=lambda: results)
    run._metrics = MetricsWriter(tmp_path)
    run.export()
    run._metrics.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.get("unsaved") == problem
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == ([{"step": 4, "checkpoint/failed": 1.0}] if problem else [])

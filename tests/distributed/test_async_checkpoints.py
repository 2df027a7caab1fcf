"""A checkpoint is written while training continues: it holds the state at the save, and no disk fault
corrupts it or ends the run.

Why: a background save that reads memory which the next update writes gives a checkpoint that is whole by
every checksum and wrong; Megatron's own does that with weights in shared memory. And disks fail at the worst
place: on one rank, at the index, at the last byte of the manifest. Proved, on two real Megatron ranks over
gloo: with the distributed, the plain (weights in shared memory) and the Schedule-Free optimizer, every
weight, moment and anchor weight changes before the first byte is written, and the checkpoint holds the old
ones. When files are cut off at any size, on one rank or all, when the disk is full at many points of a save
or read-only, or its folder is removed or replaced, between saves or within one: all ranks learn why and
continue, nothing half-written is left or taken for complete, ``latest.json`` names a complete checkpoint, and
the next save works once the disk does. Not covered: GPUs; kills (test_resume_layouts); a whole run on such a
disk (tests/integration).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.checkpoints.run_folder import ANCHOR, CHECKPOINTS, CONFIG, MODEL, find_problems, step_folder
from tests.support.checkpoints import read_whole
from tests.support.layouts import make_case, make_layout_model
from tests.support.ranks import run_ranks

STAGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "distributed": ({"data": 2}, {"distributed": True}),
    "plain, in shared memory": ({"tensor": 2}, {"distributed": False}),
    "schedule-free": ({"pipeline": 2}, {"type": "schedule_free_adamw", "distributed": False}),
}
WORK = ("first", "after", "removed between", "the run is back", "mounted", "room", "writable")
FAIL = ("no file", "removed midway", "a file", "the run is gone", "read-only", "0 of")


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a small disk."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    ).returncode:
        return False
    subprocess.run(["umount", folder], check=True)
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[dict]], bool]]:
    """Folder of the runs, the rows of each rank's saves, and whether a small disk was mounted."""
    folder = tmp_path_factory.mktemp("saving")
    make_layout_model(folder / "model", tied=False)
    small = can_mount(folder / "mount")
    with tempfile.TemporaryDirectory(prefix="rpg-test-", dir="/dev/shm") as bridge:

        def case(name: str, parallel: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
            (folder / name).mkdir()
            (folder / name / CONFIG).write_text("")
            settings = {"optimizer": optimizer, "anchor": {"type": "every", "updates": 1}}
            return {
                "settings": make_case(folder / "model", parallel, 1, settings)["settings"],
                "folder": str(folder / name),
                "bridge": bridge if "shared" in name else None,
            }

        cases = {
            "staged": {name: case(name, *how) for name, how in STAGED.items()},
            "disk": case("disk", {"tensor": 2}, {"distributed": False}),
            "mount": small,
        }
        (folder / "cases.json").write_text(json.dumps(cases))
        try:
            yield folder, run_ranks("tests.distributed.async_checkpoint_worker", 2, folder), small
            assert not os.listdir(bridge)
        finally:
            if small:
                subprocess.run(["umount", "-l", folder / "disk" / CHECKPOINTS], capture_output=True)


@pytest.mark.parametrize("step", [1, 2])  # 2: training waited
@pytest.mark.parametrize("name", STAGED)
def test_a_checkpoint_holds_what_was_when_it_was_begun(saved: Any, name: str, step: int) -> None:
    place = step_folder(saved[0] / name, step)
    assert not find_problems(place)
    for part, value in ((MODEL, step), (ANCHOR, -step)):
        tensors = read_whole(place / part)
        weights = [n for n in tensors if not n.startswith("optimizer.")]
        assert len(weights) == 4 * 8 + 3
        if part == MODEL:  # main weights apart from the model's only where the optimizer is distributed
            assert len(tensors) >= 3 * len(weights)
        for key, tensor in tensors.items():
            assert bool((tensor == value).all()), f"{part}: {key} holds {tensor.unique().tolist()[:5]}"


def test_no_disk_spoils_a_checkpoint_or_the_run(saved: Any) -> None:
    _, (rows, rank_1_rows), _ = saved
    newest = None
    for row, rank_1_row in zip(rows, rank_1_rows, strict=True):
        message = f"{row['name']}: {row}"
        assert (row["problem"] is None) == (rank_1_row["problem"] is None), message
        assert row["whole"] == row["named"], message
        works = row["name"].startswith(("first", "after", "removed between", "mounted", "room", "writable"))
        fails = row["name"].startswith(
            ("no file", "removed midway", "a file", "the run is gone", "read-only", "0 ")
        )
        assert not works or row["problem"] is None, message
        assert not fails or row["problem"], message
        assert row["name"] == "read-only" or not row["parts"], message
        if row["problem"] is None:
            newest = row["step"]
            assert row["whole"][0] == row["latest"] == newest, message
        elif row["name"] not in ("removed midway", "a file in its place", "the run is gone"):
            assert row["whole"][0] == row["latest"] == newest, message
    problems = {row["name"]: row["problem"] for row in rows}
    assert problems["no file over 100000"].startswith("rank 1: ")
    assert "File too large" in problems["no file over 3000"]


def test_a_full_and_a_read_only_disk(saved: Any) -> None:
    _, (rows, _), small = saved
    if not small:
        pytest.skip("mounting a small disk needs root")
    problems = {row["name"]: row["problem"] for row in rows}
    full = [problem for name, problem in problems.items() if name.endswith("pages")]
    assert len(full) >= 8
    assert full.pop() is None  # the smallest size that suffices
    assert all("No space left on device" in problem for problem in full), full
    # For the weights on some rank; then, page by page, for index, small files, manifest, latest.json.
    assert any(problem.startswith("rank") for problem in full)
    assert sum(not problem.startswith("rank") for problem in full) >= 5, full
    assert "Read-only file system" in problems["read-only"]
    assert problems["writable again"] is None

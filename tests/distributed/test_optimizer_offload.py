"""An optimizer with a share in host memory makes the same updates, and checkpoints load either way.

Why: Megatron's offloading optimizer has separate code for updates and checkpoints, with pitfalls (see
``policy/optimizer.py``). Proved: with everything offloaded, or half, three updates end at the weights, main
weights and moments of the optimizer on the device, and so does the third after a checkpoint of the second was
loaded by the other kind, or with another share. The CPU stands for both devices here (see
``optimizer_offload_worker``), so the arithmetic, the distribution of tensors and the checkpoints are
Megatron's own and real. Not covered: what the test replaces, which is copies between devices, pinned memory
and streams; and that anything is saved.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.checkpoints.run_folder import step_folder
from tests.support.checkpoints import compare, make_resume_case, write_batch
from tests.support.ranks import run_ranks


def make_offload_case(
    folder: Path, share: float, data: int, load: str | None, saves: list[str | None]
) -> dict[str, Any]:
    case = make_resume_case(folder, "distributed", {"data": data}, load, saves)
    case["settings"] |= {
        "device": "cuda",
        "precision": {"dtype": "bfloat16"},
        "memory": {"offload_optimizer": share},
    }
    return case


@pytest.mark.parametrize(
    ("data", "share"), [(1, 0.5), *(pytest.param(2, s, marks=pytest.mark.long) for s in (0.5, 1))]
)
def test_the_same_updates_and_checkpoints_for_each_other(tmp_path: Path, data: int, share: float) -> None:
    write_batch(tmp_path)

    def make(of: float, load: str | None, saves: list[str | None]) -> dict[str, Any]:
        return make_offload_case(tmp_path, of, data, load, saves)

    cases = {
        "on the device": make(0, None, [None, "second", "third"]),
        "off": make(share, None, [None, "off second", "off third"]),
        "off, from on": make(share, "second", ["off from on"]),
        "on, from off": make(0, "off second", ["on from off"]),
        "another share, from off": make(0.25, "off second", ["another from off"]),
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    results = run_ranks("tests.distributed.optimizer_offload_worker", data, tmp_path)
    counts = re.findall(r"update: (\d+) off, (\d+) on", (tmp_path / "rank_0.log").read_text())
    halves = [(int(off), int(on)) for off, on in counts]
    assert len(halves) == 3 + 1 + 1  # and no other update
    assert all(off and bool(on) == (share < 1) for off, on in halves[:4]), halves
    expected = results["on the device"]
    for name, reports in results.items():
        for actual, report in zip(reports[::-1], expected[::-1], strict=False):
            assert actual == pytest.approx(report, rel=1e-5), name
    folder = tmp_path / "distributed"
    for name in ("off third", "off from on", "on from off", "another from off"):
        compare(step_folder(folder / "third", 1), step_folder(folder / name, 1), 1e-6)

"""A training checkpoint loads in any layout, and the next update is the right one.

Why: optimizer state that is lost or assigned wrongly shows only as a run that learns worse; in
Megatron a rank that owns no parameter of a group can lose the step count that way.
Proved, on real Megatron over gloo in fp32: after three updates at TP2xPP2, saved after the second, a policy
that loads the checkpoint at DP4 (TP1), PP2xVPP2xDP2, on one rank, and back at TP2xPP2 from what DP4
wrote, makes the next update with the same loss and gradient norm, and ends with the same weights, moments and
held anchor; for the distributed, the plain and the Schedule-Free optimizer, and for adapters (LoRA), whose
checkpoints hold no other weights (in the default tier the first and the last), with a
vocabulary that the layouts pad differently. At the layout that saved, every number is the same bit for bit.
Long: also at
TP2xDP2, PP2xDP2 and CP2xTP2, and at TP1, TP2, DP2 and PP2 on as few ranks as they need, and back at TP2xPP2
from each of these.
A trainer that is killed with SIGKILL while it saves in the background leaves whole checkpoints only, and the
newest one loads; only kills that fell within a save count.
Not covered: GPUs, bfloat16, what else a run's checkpoint holds (tests/integration), disks
(test_async_checkpoints).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

from rpg_megatron.checkpoints.megatron_folder import MANIFEST
from rpg_megatron.checkpoints.run_folder import (
    find_problems,
    list_steps,
    part_folder,
    step_folder,
)
from tests.support.checkpoints import OPTIMIZERS, WEIGHTS, compare, make_resume_case, write_batch
from tests.support.layouts import make_case
from tests.support.ranks import run_ranks, start_ranks
from tests.support.tiny_models import CONFIGS, make_model

SAVED = {"tensor": 2, "pipeline": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2xPP2": SAVED,
    "DP4": {"data": 4},
    "TP2xDP2+SP": {"tensor": 2, "data": 2, "sequence": True},
    "PP2xDP2": {"pipeline": 2, "data": 2},
    "PP2xVPP2xDP2": {"pipeline": 2, "virtual": 2, "data": 2},
    "CP2xTP2+SP": {"context": 2, "tensor": 2, "sequence": True},
}
NEEDED = {
    "distributed": ("TP2xPP2", "DP4"),
}
"""Cases of the default tier. Adapters are in the next test, Muon in test_expert_checkpoints."""
FEWER: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "DP2": (2, {"data": 2}),
    "PP2": (2, {"pipeline": 2}),
}
"""Ranks and layout."""


def run_cases(folder: Path, world: int, cases: dict[str, Any]) -> dict[str, Any]:
    (folder / "cases.json").write_text(json.dumps(cases))
    return run_ranks("tests.distributed.resume_worker", world, folder, timeout=900)


def check(
    folder: Path,
    results: dict[str, Any],
    kind: str,
    name: str,
    *,
    back: bool,
    tolerance: float,
    count: int | None = None,
) -> None:
    """Compare a case with the uninterrupted run; ``back``: it made the fourth update, not the third.

    count: weights in a checkpoint; None: those of the usual model.
    """
    count = count or WEIGHTS.get(kind, 4 * 8 + 3)
    place, update = ("fourth", 3) if back else ("third", 2)
    expected, (actual,) = results[f"{kind}, straight"][update], results[f"{kind}, {name}"]
    for key in ("loss", "grad_norm"):
        assert abs(actual[key] - expected[key]) <= tolerance, (kind, name, key, actual, expected)
    folders = [step_folder(folder / kind / run, 1) for run in (place, name)]
    assert not any(find_problems(checkpoint) for checkpoint in folders)
    compare(folders[0], folders[1], tolerance, count=count)


@pytest.mark.parametrize(
    "looked_at",
    [NEEDED, pytest.param(dict.fromkeys(OPTIMIZERS, tuple(LAYOUTS)), marks=pytest.mark.long)],
    ids=["few", "all"],
)
def test_the_next_update_is_the_same_in_other_layouts(
    tmp_path: Path, looked_at: dict[str, tuple[str, ...]]
) -> None:
    write_batch(tmp_path)
    cases = {}
    for kind, names in looked_at.items():
        straight = [None, "second", "third", "fourth"]
        cases[f"{kind}, straight"] = make_resume_case(tmp_path, kind, SAVED, None, straight)
        for name in names:
            cases[f"{kind}, {name}"] = make_resume_case(tmp_path, kind, LAYOUTS[name], "second", [name])
        cases[f"{kind}, back"] = make_resume_case(tmp_path, kind, SAVED, "DP4", ["back"])
    results = run_cases(tmp_path, 4, cases)
    alone = {
        f"{kind}, one rank": make_resume_case(tmp_path, kind, {}, "second", ["one rank"])
        for kind in looked_at
    }
    results |= run_cases(tmp_path, 1, alone)
    for kind, names in looked_at.items():
        for name in (*names, "one rank", "back"):
            tolerance = 0.0 if name == "TP2xPP2" else 1e-6
            check(tmp_path, results, kind, name, back=name == "back", tolerance=tolerance)


@pytest.mark.parametrize(
    ("family", "kind", "names"),
    [
        *(
            pytest.param(*case, ("TP2xPP2", "DP4", "CP2xTP2+SP"), marks=pytest.mark.long)
            for case in (
                *((family, "distributed") for family in ("phi3", "olmo3", "qwen3_5")),
                ("qwen3_5", "adapters"),
            )
        ),
        ("qwen3_5", "adapters", ("DP4",)),
    ],
)
def test_layers_of_other_kinds(tmp_path: Path, family: str, kind: str, names: tuple[str, ...]) -> None:
    """Fused tensors; windows, norms behind blocks and over all heads, which each tensor rank has whole;
    linear attention, whose parameters, and B of whose queries, keys and values, checkpoints have in parts.
    """
    sizes = {"vocab_size": 251, "intermediate_size": 160, "num_hidden_layers": 4, "sliding_window": 16}
    write_batch(tmp_path, make_model(tmp_path / "model", family, noise=0.08, **sizes))
    straight = [None, "second", "third"]
    saved = SAVED | {"sequence": family == "qwen3_5"}
    cases = {f"{kind}, straight": make_resume_case(tmp_path, kind, saved, None, straight)}
    for name in names:
        layout = saved if name == "TP2xPP2" else LAYOUTS[name]
        case = make_resume_case(tmp_path, kind, layout, "second", [name])
        cases[f"{kind}, {name}"] = case
    results = run_cases(tmp_path, 4, cases)
    count = {"phi3": 4 * 6, "olmo3": 4 * 8, "qwen3_5": 2 * 17 + 2 * 8}[family] + 3
    if kind == "adapters":  # A and B of all projections and of the head; one B has three parts
        count = 2 * (2 * 5 + 2 * 4 + 4 * 3 + 1) + 2 * 2
    for name in names:
        other = 5e-6 if family == "qwen3_5" else 1e-6  # its norms amplify rounding
        tolerance = 0.0 if name == "TP2xPP2" else other
        check(tmp_path, results, kind, name, back=False, tolerance=tolerance, count=count)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_float32_beside_bfloat16(tmp_path: Path, world: int) -> None:
    """The rates of linear attention, and their moments: at the layout that saved, bit by bit."""
    sizes = {"vocab_size": 251, "intermediate_size": 160, "num_hidden_layers": 4, "dtype": "bfloat16"}
    write_batch(tmp_path, make_model(tmp_path / "model", "qwen3_5", noise=0.08, **sizes))
    layout = {"tensor": 2, "sequence": True, "data": world // 2}
    cases = {
        "distributed, straight": make_resume_case(
            tmp_path, "distributed", layout, None, [None, "second", "third"]
        ),
        "distributed, again": make_resume_case(tmp_path, "distributed", layout, "second", ["again"]),
    }
    for case in cases.values():
        case["settings"]["precision"]["dtype"] = "bfloat16"
    results = run_cases(tmp_path, world, cases)
    check(tmp_path, results, "distributed", "again", back=False, tolerance=0.0, count=2 * 17 + 2 * 8 + 3)


@pytest.mark.long
def test_on_fewer_ranks_and_back(tmp_path: Path) -> None:
    """Saved at TP2xPP2, the third update at TP1, TP2, DP2 and PP2, and the fourth at TP2xPP2 from each."""
    write_batch(tmp_path)
    results: dict[str, Any] = {}
    straight = [None, "second", "third", "fourth"]
    results |= run_cases(
        tmp_path,
        4,
        {f"{k}, straight": make_resume_case(tmp_path, k, SAVED, None, straight) for k in OPTIMIZERS},
    )
    for world in (1, 2):
        fewer = {name: parallel for name, (ranks, parallel) in FEWER.items() if ranks == world}
        cases = {
            f"{kind}, {name}": make_resume_case(tmp_path, kind, parallel, "second", [name])
            for kind in OPTIMIZERS
            for name, parallel in fewer.items()
        }
        results |= run_cases(tmp_path, world, cases)
    cases = {
        f"{kind}, back from {name}": make_resume_case(tmp_path, kind, SAVED, name, [f"back from {name}"])
        for kind in OPTIMIZERS
        for name in FEWER
    }
    results |= run_cases(tmp_path, 4, cases)
    for kind in OPTIMIZERS:
        for name in FEWER:
            check(tmp_path, results, kind, name, back=False, tolerance=1e-6)
            check(tmp_path, results, kind, f"back from {name}", back=True, tolerance=1e-6)


def start_saving(folder: Path, world: int) -> tuple[list[Any], TextIO]:
    """Ranks that save checkpoints of steps 1, 2, ... into ``folder``, or resume from the newest."""
    if not (folder / "model").exists():  # 50 MB a save, so that none is over in a moment
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIGS["qwen3"] | {"vocab_size": 32768}))
    settings = {"anchor": {"type": "every", "updates": 1}, "optimizer": {"distributed": True}}
    case = make_case(folder / "model", {"data": world}, 1, settings)
    (folder / "config.yaml").write_text(json.dumps(case["settings"]))
    return start_ranks("tests.distributed.killed_save_worker", world, folder)


def kill(workers: list[Any]) -> None:
    """Kill all workers at the same time."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, number)
    for worker in workers:
        worker.join()


def describe(folder: Path, step: int) -> str:
    """The stage that the save of a step had reached."""
    place = step_folder(folder, step)
    if place.exists():
        return "named"
    files = {f.name for f in part_folder(place).rglob("*") if f.is_file()}
    if MANIFEST in files:
        return "manifest begun"
    if ".metadata" in files or ".metadata.tmp" in files:
        return "index begun"
    return "weights begun" if files else "nothing written"


@pytest.mark.parametrize(("kills", "world"), [(3, 1), pytest.param(20, 2, marks=pytest.mark.long)])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(
    tmp_path: Path, kills: int, world: int, record_property: Any
) -> None:
    moments: list[str] = []
    late = 0
    while True:
        workers, lines = start_saving(tmp_path, world)
        step = 0
        try:
            before = list(itertools.takewhile(lambda line: not line.startswith("at "), lines))
            assert workers[0].is_alive(), "".join(before)
            if len(moments) == kills:
                break  # it has loaded what the last kill left
            # Two saves may finish, to measure how long one takes.
            saves = (m for line in lines if (m := re.fullmatch(r"saved (\d+) in (\S+)\n", line)))
            _, saved = next(saves), next(saves)
            step, seconds = int(saved[1]) + 1, float(saved[2])
            next(line for line in lines if line == f"saving {step}\n")
            share = random.random()
            time.sleep(share * seconds)
        finally:
            kill(workers)
        with lines:
            ended = any(line.startswith(f"saved {step}") for line in lines)
        if ended:
            late += 1  # a kill between saves proves nothing
            assert late <= kills + 5
        else:
            moments.append(f"{share:.0%}: {describe(tmp_path, step)}")
        whole = [step for step, place in list_steps(tmp_path).items() if not find_problems(place)]
        # Every reported save exists, and every listed checkpoint is whole.
        assert whole, list((tmp_path / "checkpoints").iterdir())
        assert whole[0] >= step - 1
        assert len(whole) == len(list_steps(tmp_path))
        latest = json.loads((tmp_path / "checkpoints" / "latest.json").read_text())
        assert latest["step"] in whole
    record_property("moments", moments)
    print(f"{kills} kills within a save, {late} after one; at what part of its time, and how far it was:")
    print("\n".join(sorted(moments, key=lambda m: int(m.partition("%")[0]))))

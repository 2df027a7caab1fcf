"""The comparison of killed runs (``tests/support``) notices what it is there for, and says what it is.

Why: a comparison that cannot fail proves nothing, and its cases are long (test_kills). Here each difference
is planted, one at a time, into a small folder with all that a run leaves, or beside it; no run is started.
The phases are those that events and files name. Not covered: a real kill.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from rpg_megatron.data.rollout_files import part_file, read_rollouts, write_rollouts
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.events import EVENTS, EventSender
from tests.support.commands import Command
from tests.support.kills import ENDS, draw, targets_of
from tests.support.moments import PHASES, EventTap, read_moment
from tests.support.same_runs import compare_files, compare_rows, find_missing_rollouts, read_rows
from tests.support.watched_runs import LAYOUTS, Traces


def write_run(run: Path, second: float) -> Path:
    """What a run leaves, in small. second: what the times in it are made from."""
    for folder in ("hf/step_000002", "checkpoints/step_000002", "logs", "evaluation"):
        (run / folder).mkdir(parents=True)
    rows = [
        {
            "step": step,
            "policy/loss": 0.1 * step,
            "sync/bytes": 100.0,
            "time/step": second,
            "mismatch/logp_max": 0,
        }
        for step in range(3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "logs" / "rank_0.log").write_text(str(second))
    (run / "evaluation" / "step_000002.jsonl").write_text('{"correct": true}\n')
    weights = {"weight": torch.arange(12.0).view(3, 4)}
    save_file(weights, run / "hf" / "step_000002" / "model.safetensors")
    save = run / "checkpoints" / "step_000002"
    dcp.save(weights, checkpoint_id=str(save / "model"), no_dist=True)
    state = {
        "row": rows[2],
        "summary": {"rates": [second]},
        "metrics_bytes": 9,
        "seconds": second,
        "sampler": [7],
    }
    (save / "state.json").write_text(json.dumps(state))
    (run / "config.yaml").write_text(f"runs: {run.parent}\nseed: 17\n")
    (run / "summary.json").write_text(json.dumps({"steps": 2, "seconds": second}))
    part = np.ones(2, np.float32)
    tokens = np.array([4, 5], np.int32)
    behaviour = part * np.float32(second)  # the engine's, which depends on how it batched
    trajectory = Trajectory(0, 0, tokens, tokens, behaviour, tokens, "stop", "text", reward=1.0, old=part)
    write_rollouts(run / "rollouts" / "step_000002.parquet", [trajectory])
    return run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "a" / "run", 1.0), write_run(tmp_path / "b" / "run", 2.0)


def flip(file: Path) -> None:
    """One bit, of the last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def edit(file: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        content = json.loads((run / file).read_text())
        change(content)
        (run / file).write_text(json.dumps(content))

    return apply


def edit_reward(run: Path) -> None:
    file = run / "rollouts" / "step_000002.parquet"
    trajectories = read_rollouts(file)
    trajectories[0].reward = -1.0
    write_rollouts(file, trajectories)


STATE = "checkpoints/step_000002/state.json"
PLANTED = {
    "hf/step_000002/model.safetensors differs": lambda run: flip(run / "hf/step_000002/model.safetensors"),
    "checkpoints/step_000002/model/__0_0.distcp differs": lambda run: flip(
        run / "checkpoints/step_000002/model/__0_0.distcp"
    ),
    f"{STATE} differs": edit(STATE, lambda state: state.update(sampler=[8])),
    "summary.json differs": edit("summary.json", lambda summary: summary.update(steps=3)),
    "rollouts/step_000002.parquet differs": edit_reward,
    "evaluation/step_000002.jsonl is missing": lambda run: (run / "evaluation/step_000002.jsonl").unlink(),
    "checkpoints/.step_000003.part/x is too many": lambda run: (
        (run / "checkpoints/.step_000003.part").mkdir(),
        (run / "checkpoints/.step_000003.part/x").touch(),
    ),
}


def test_times_and_paths_are_no_difference(runs: tuple[Path, Path]) -> None:
    one, other = runs
    assert compare_files(one, other) == []
    assert compare_rows(read_rows(one), read_rows(other)) == []


def test_a_step_without_all_its_rollouts_is_told(runs: tuple[Path, Path]) -> None:
    run, _ = runs
    file = run / "rollouts" / "step_000002.parquet"
    told = [f"step {step} is done, but its rollouts are not written" for step in (1, 2)]
    assert find_missing_rollouts(run) == told[:1]  # the runs here have one file
    whole = file.read_bytes()
    file.unlink()
    (file := part_file(file, 1, 2)).parent.mkdir()
    file.write_bytes(whole)
    assert find_missing_rollouts(run) == told
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints" / "step_000002" / "manifest.json").touch()
    assert find_missing_rollouts(run) == told[1:]


@pytest.mark.parametrize("told", PLANTED)
def test_a_planted_difference_of_files_is_told(told: str, runs: tuple[Path, Path]) -> None:
    one, other = runs
    PLANTED[told](one)
    assert compare_files(one, other) == [told]


def test_a_planted_difference_of_rows_is_told(runs: tuple[Path, Path]) -> None:
    rows, wanted = read_rows(runs[0]), read_rows(runs[1])
    assert compare_rows(rows[:2], wanted) == []  # so far
    assert compare_rows([rows[0], rows[2]], wanted) == ["rows of steps [0, 2]; wanted 0, 1, ... up to 2"]
    assert compare_rows([rows[0], rows[0]], wanted) != []
    rows[1]["policy/loss"] = np.nextafter(0.1, 1.0).item()
    assert compare_rows(rows, wanted) == ["metrics of step 1: policy/loss is 0.10000000000000002, not 0.1"]
    rows[1] = wanted[1] | {"new": 1.0}
    assert compare_rows(rows, wanted) == ["metrics of step 1: new is 1.0, not missing"]
    rows[1] = wanted[1] | {"mismatch/logp_max": 0.01}
    assert compare_rows(rows, wanted) == ["metrics of step 1: mismatch/logp_max is 0.01"]
    rows[1] = wanted[1] | {"sync/bytes": 50.0}  # what one of two engines takes, while the other is away
    assert compare_rows(rows, wanted, engines=2, lost=1) == []
    for engines, lost in ((2, None), (2, 2), (1, 1)):
        assert compare_rows(rows, wanted, engines=engines, lost=lost) != []


def test_what_a_run_leaves_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    work = tmp_path / "t" / "rpg-work"
    work.mkdir(parents=True)
    command = Command(tmp_path, "--help")
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {"RPG_TEST_MARK": command.mark},
        start_new_session=True,
    )
    with tempfile.NamedTemporaryFile(prefix="psm_test_", dir="/dev/shm", delete=False) as memory:
        traces = Traces([command], {Path(memory.name)})  # type: ignore[list-item]
    try:
        command.finish()
        (work / "owner.json").write_text(json.dumps({"pid": command.process.pid}))
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(work / "s"))
            found = "\n".join(traces.left(tmp_path / "t"))
        assert f"process {sleeper.pid} is left" in found
        assert f"{memory.name} is left" in found
        assert f"{work} is left" in found
        assert f"{work / 's'} is left" in found
    finally:
        sleeper.kill()
        sleeper.wait()
        Path(memory.name).unlink()
    shutil.rmtree(work)
    assert traces.left(tmp_path / "t") == []


def test_phases_by_events_and_files() -> None:
    """With the events in their order, and files as a run writes them."""
    with tempfile.TemporaryDirectory() as short:
        run, work = Path(short) / "run", Path(short)
        for folder in ("rollouts", "evaluation", "checkpoints"):
            (run / folder).mkdir(parents=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
            launcher.bind(str(work / EVENTS))
            tap, sender = EventTap(work), EventSender(work / EVENTS)

            def phase(event: str | None, published: bool | None = None) -> tuple[str, ...]:
                if event == "step":
                    sender.send({"kind": "step", "row": {}})
                    with (run / "metrics.jsonl").open("a") as file:
                        file.write("{}\n")
                elif event:
                    sender.phase(event, 0, 1)
                tap.pump(1.0 if event else 0.0)
                if event:
                    assert json.loads(launcher.recv(4096))["kind"] in ("step", "phase")  # it was passed on
                return read_moment(tap, run, since, published).proven

            (run / "checkpoints" / ".step_000000.part").mkdir()  # left by a kill
            time.sleep(0.05)
            since = time.time()
            assert phase(None) == phase("checkpoint") == phase("waiting for engines", True) == ("start",)
            assert phase("evaluation") == ("evaluation",)
            (run / "evaluation" / "step_000000.jsonl").touch()
            assert phase(None) == phase("step") == ()
            assert phase("rollout") == ("rollout",)
            assert phase("logprobs") == ()
            (run / "rollouts" / "step_000001.parquet").touch()
            assert phase("update") == ("update",)
            assert phase("sync", False) == ()
            assert phase(None, True) == phase(None, None) == ("sync",)
            assert phase("step") == ()
            time.sleep(0.05)
            (run / "checkpoints" / ".step_000001.part").mkdir()
            assert phase("checkpoint") == ("save",)
            assert phase("rollout") == ("save", "rollout")
            (run / "checkpoints" / ".step_000001.part").rmdir()
            assert phase("export") == ("export",)
            (run / "summary.json").touch()
            assert phase(None) == ()
            tap.close()
            sender.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twelve_seeds_aim_at_everything(layout: str) -> None:
    kills = [draw(layout, seed) for seed in range(12)]
    assert kills == [draw(layout, seed) for seed in range(12)]
    pairs = Counter((kill.target, kill.phase) for run in kills for kill in run)
    assert set(pairs) == {(target, phase) for target in targets_of(layout) for phase in PHASES}
    for run in kills:
        phases = [kill.phase for kill in run]
        assert "export" not in phases or set(phases[phases.index("export") :]) <= {"start", "export"}
        for before, kill in zip([SimpleNamespace(target=ENDS[0]), *run], run, strict=False):
            assert kill.phase != "start" or before.target in ENDS or before.phase == "start"

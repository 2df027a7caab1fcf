"""The comparison of killed runs (``tests/support``) notices each kind of difference, and names it.

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
import yaml
from safetensors.torch import save_file

from rpg_megatron.data.rollout_files import part_file, read_rollouts, write_rollouts
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.events import EVENTS, EventSender
from tests.support.ahead_runs import compare_ahead, count_mixed
from tests.support.commands import Command
from tests.support.kills import ENDS, draw, phases_of, targets_of
from tests.support.moments import EventTap, read_moment
from tests.support.runs import QUICKSTART
from tests.support.same_runs import compare_files, compare_rows, find_missing_rollouts, read_rows
from tests.support.watched_runs import AHEAD, LAYOUTS, VERIFIERS, Traces


def write_run(run: Path, second: float) -> Path:
    """A small copy of what a run leaves. second: the value of all times in it."""
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
    """Flip a bit of the last byte."""
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
    first, second = runs
    assert compare_files(first, second) == []
    assert compare_rows(read_rows(first), read_rows(second)) == []


def test_a_step_without_all_its_rollouts_is_told(runs: tuple[Path, Path]) -> None:
    run, _ = runs
    file = run / "rollouts" / "step_000002.parquet"
    problems = [f"step {step} is done, but its rollouts are not written" for step in (1, 2)]
    assert find_missing_rollouts(run) == problems[:1]  # the runs here have one file
    whole = file.read_bytes()
    file.unlink()
    (file := part_file(file, 1, 2)).parent.mkdir()
    file.write_bytes(whole)
    assert find_missing_rollouts(run) == problems
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints" / "step_000002" / "manifest.json").touch()
    assert find_missing_rollouts(run) == problems[1:]


@pytest.mark.parametrize("problem", PLANTED)
def test_a_planted_difference_of_files_is_told(problem: str, runs: tuple[Path, Path]) -> None:
    first, second = runs
    PLANTED[problem](first)
    assert compare_files(first, second) == [problem]


def test_a_planted_difference_of_rows_is_told(runs: tuple[Path, Path]) -> None:
    rows, expected = read_rows(runs[0]), read_rows(runs[1])
    assert compare_rows(rows[:2], expected) == []  # so far
    assert compare_rows([rows[0], rows[2]], expected) == ["rows of steps [0, 2]; wanted 0, 1, ... up to 2"]
    assert compare_rows([rows[0], rows[0]], expected) != []
    rows[1]["policy/loss"] = np.nextafter(0.1, 1.0).item()
    assert compare_rows(rows, expected) == ["metrics of step 1: policy/loss is 0.10000000000000002, not 0.1"]
    rows[1] = expected[1] | {"new": 1.0}
    assert compare_rows(rows, expected) == ["metrics of step 1: new is 1.0, not missing"]
    rows[1] = expected[1] | {"mismatch/logp_max": 0.01}
    assert compare_rows(rows, expected) == ["metrics of step 1: mismatch/logp_max is 0.01"]
    rows[1] = expected[1] | {"sync/bytes": 50.0}  # what one of two engines takes, while the other is away
    assert compare_rows(rows, expected, engines=2, lost=1) == []
    for engines, lost in ((2, None), (2, 2), (1, 1)):
        assert compare_rows(rows, expected, engines=engines, lost=lost) != []


AHEAD_ROW = {
    "lr": 0.1,
    "async/probe_tokens": 8.0,
    "mismatch/logp_max": 1e-6,
    "mismatch/logp_mean": 1e-7,
    "mismatch/logp_engine_mean": 1e-7,
}


def write_ahead(run: Path, *, versions: tuple[int, int] = (0, 1)) -> Path:
    """Two steps of two groups of two responses, sampled one step ahead. versions: of step 2's tokens."""
    run.mkdir(parents=True)
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 8, "ahead": 1}
    config = yaml.safe_load(QUICKSTART.read_text()) | {"rollout": sizes, "correction": {"type": "truncate"}}
    for place in (config["model"], config["data"], config["evaluation"]["data"]):
        place["path"] = str(QUICKSTART.parent / place["path"])
    config["training"]["minibatches"] = 1
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": step, "sync/version": step} | (AHEAD_ROW if step else {}) for step in range(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part, tokens = np.ones(2, np.float32), np.array([4, 5], np.int32)
    for step in (1, 2):
        token_versions = np.array(versions if step == 2 else (0, 0), np.int32)
        batch = [
            Trajectory(
                t, s, tokens + t, tokens, part, token_versions, "stop", "text", group=g, ticket=t, old=part
            )
            for g, t in enumerate(range(2 * step - 2, 2 * step))
            for s in range(2)
        ]
        write_rollouts(run / "rollouts" / f"step_{step:06d}.parquet", batch)
    return run


def edit_batch(run: Path, change: Callable[[list[Trajectory]], None]) -> None:
    """Change the rollouts of step 2."""
    file = run / "rollouts" / "step_000002.parquet"
    batch = read_rollouts(file)
    change(batch)
    write_rollouts(file, batch)


AGES = "rollouts of step 2: ticket 3, sample 1: tokens of age"
PLANTED_AHEAD: dict[str, Callable[[list[Trajectory]], None]] = {
    "rollouts of step 2: (ticket, sample) [(3, 0)] lost, [(2, 0)] too many": lambda b: setattr(
        b[2], "ticket", 2
    ),
    "rollouts of step 2: (ticket, sample) [(3, 1)] lost, [(3, 0)] too many": lambda b: setattr(
        b[3], "sample", 0
    ),
    "rollouts of step 2: (ticket, sample) [(3, 1)] lost, [] too many": lambda b: b.pop() and None,
    "rollouts of step 2: tickets or samples in another order": lambda b: b.reverse(),
    "rollouts of step 2: other prompts": lambda b: setattr(b[0], "prompt", b[2].prompt),
    f"{AGES} [0, 2], not 0 to 1": lambda b: setattr(b[3], "versions", np.array([-1, 1], np.int32)),
    f"{AGES} [-1, 0], not 0 to 1": lambda b: setattr(b[3], "versions", np.array([1, 2], np.int32)),
}


def test_of_a_run_ahead_other_contents_are_no_difference(tmp_path: Path) -> None:
    run, reference = write_ahead(tmp_path / "a"), write_ahead(tmp_path / "b", versions=(1, 1))
    edit_batch(run, lambda batch: setattr(batch[0], "response", batch[0].response + 1))
    assert compare_ahead(run, reference) == compare_ahead(reference, run) == []
    assert (count_mixed(run), count_mixed(reference)) == (4, 0)


@pytest.mark.parametrize("problem", PLANTED_AHEAD)
def test_a_planted_fault_of_a_run_ahead_is_told(problem: str, tmp_path: Path) -> None:
    run, reference = write_ahead(tmp_path / "a"), write_ahead(tmp_path / "b")
    edit_batch(run, PLANTED_AHEAD[problem])
    assert compare_ahead(run, reference) == [problem]


def test_planted_metrics_of_a_run_ahead_are_told(tmp_path: Path) -> None:
    run, reference = write_ahead(tmp_path / "a"), write_ahead(tmp_path / "b")
    rows = read_rows(run)

    def compare(*changed: dict[str, Any]) -> list[str]:
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        return compare_ahead(run, reference)

    assert compare(*rows[:2]) == []  # so far
    assert compare(rows[0], rows[1], rows[1]) == ["rows of steps [0, 1, 1]; wanted 0, 1, ... up to 2"]
    for planted in (
        {"async/probe_tokens": 0.0},
        {"mismatch/logp_max": 0.01},
        {"mismatch/logp_mean": 2e-4},
        {"mismatch/logp_mean": float("nan")},
        {"mismatch/logp_engine_mean": 5e-6, "mismatch/logp_engine_ratio": 9.0},
        {"sync/version": 0},
    ):
        assert len(compare(rows[0], rows[1] | planted)) == 1


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
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(work / "s"))
            remains = "\n".join(traces.left(tmp_path / "t"))
        assert f"process {sleeper.pid} is left" in remains
        assert f"{memory.name} is left" in remains
        assert f"{work} is left" in remains
        assert f"{work / 's'} is left" in remains
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
                    sender.send({"kind": "step"})
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
def test_the_seeds_of_a_layout_aim_at_everything(layout: str) -> None:
    seeds = range({AHEAD: 6, VERIFIERS: 13}.get(layout, 12))
    kills = [draw(layout, seed) for seed in seeds]
    assert kills == [draw(layout, seed) for seed in seeds]
    pairs = Counter((kill.target, kill.phase) for run in kills for kill in run)
    assert set(pairs) == {(target, phase) for target in targets_of(layout) for phase in phases_of(layout)}
    for run in kills:
        phases = [kill.phase for kill in run]
        assert "export" not in phases or set(phases[phases.index("export") :]) <= {"start", "export"}
        for before, kill in zip([SimpleNamespace(target=ENDS[0]), *run], run, strict=False):
            assert kill.phase != "start" or before.target in ENDS or before.phase == "start"

"""A killed run goes on with the same command, and ends bit for bit where it would have ended.

Why: whatever a checkpoint forgets (a moment, the place in the data, the anchor, a version) shows only as a
run that learns a little worse. Proved, with real engines and two trainer ranks by the command line in fp32:
every process of a run is killed with SIGKILL at a random moment of a middle step; the same command says that
it continues, from where; weights after the last step, rollouts and metrics rows equal those of a run that was
left alone, each row is there once, and nothing is left of the first attempt. Not covered: GPUs, a change of
layout (tests/distributed), several nodes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from rpg_megatron.training.journal import read_rollouts

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    "training.steps=5",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "evaluation.data.limit=8",
    "evaluation.every=3",
    "anchor={type: every, updates: 6}",
    "checkpoint={every: 2, keep: 1}",
]
TIMEOUT = 580.0
"""Seconds that a run may take, on a machine that is busy with other things."""
SAME = (
    "policy/",
    "kl/",
    "ratio/",
    "reward/",
    "response/",
    "eval/",
    "lr",
    "step",
    "sync/version",
    "sync/bytes",
)
"""What does not depend on time or on how the engine happened to batch requests."""


def start(runs: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the command; its output goes to a file."""
    log = runs / f"{name}.log"
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(QUICKSTART), *SETTINGS]
    with log.open("a") as out:
        process = subprocess.Popen(
            [*command, f"runs={runs}", f"name={name}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return process, log


def rows_of(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(row) for row in whole.splitlines()]


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a launcher and everything below it, at once."""
    launcher = psutil.Process(process.pid)
    tree = [*launcher.children(recursive=True), launcher]
    for one in tree:
        one.suspend()
    for one in tree:
        one.kill()
    process.wait()


def test_the_same_command_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    first, log = start(tmp_path, "killed")
    straight, other_log = start(tmp_path, "straight")  # starting an engine takes longest; both at once
    try:
        compare_with_killed(first, log, straight, other_log)
    finally:
        straight.terminate()
        straight.wait(60)


def compare_with_killed(
    first: subprocess.Popen[str], log: Path, straight: subprocess.Popen[str], other_log: Path
) -> None:
    tmp_path = log.parent
    run = tmp_path / "killed-001"
    try:
        end = time.monotonic() + TIMEOUT
        while len(rows_of(run)) < 4:  # steps 0 to 3; the checkpoint of step 2 is there, step 4 is under way
            assert first.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        pace = rows_of(run)[3]["time/step"]
        time.sleep(random.uniform(0, pace))
        assert first.poll() is None, "the run was over before it could be killed"
    finally:
        kill_all(first)
    assert not (run / "summary.json").exists()

    again, _ = start(tmp_path, "killed")
    assert again.wait(TIMEOUT) == 0, log.read_text()
    told = log.read_text()
    assert f"continuing {run} from step 2" in told or f"continuing {run} from step 4" in told, told
    assert not (tmp_path / "killed-002").exists()
    assert straight.wait(TIMEOUT) == 0, other_log.read_text()

    reference = tmp_path / "straight-001"
    got, wanted = rows_of(run), rows_of(reference)
    assert [row["step"] for row in got] == [row["step"] for row in wanted] == [0, 1, 2, 3, 4, 5]
    for mine, theirs in zip(got, wanted, strict=True):
        mine, theirs = ({k: v for k, v in row.items() if k.startswith(SAME)} for row in (mine, theirs))
        assert mine == theirs
    weights, others = (load_file(r / "hf" / "step_000005" / "model.safetensors") for r in (run, reference))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
    for step in range(1, 6):
        name = f"rollouts/step_{step:06d}.jsonl.zst"
        mine, theirs = read_rollouts(run / name), read_rollouts(reference / name)
        assert [t.response.tolist() for t in mine] == [t.response.tolist() for t in theirs]
    summaries = [json.loads((r / "summary.json").read_text()) for r in (run, reference)]
    assert summaries[0]["accuracy_before"] == summaries[1]["accuracy_before"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest.json", "step_000005"]

"""Fine-tuning by the command line: epochs, held-out loss, resuming, and then RL.

Proved, on real ranks: a run of two and a half epochs trains each conversation as often as it should, in an
order that the seed alone decides; stopped in the middle of an epoch and resumed in another layout it
continues with the same losses; its held-out loss falls, its rows are on the metrics page, it starts no engine
and leaves nothing behind. Mistakes are one line. Long: killed at any time, evaluated by an engine, from the
rollouts of a run whose weights go on to RL, with Schedule-Free AdamW, FP8 that a CPU emulates, and experts.
Not covered here: gradients (tests/distributed/test_fine_tuning), data (tests/unit/test_conversations), GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.support.commands import Command
from tests.support.metrics_page import missing_from_page
from tests.support.runs import QUICKSTART, QUICKSTART_MOE

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(900)]

ROWS, BATCH = 40, 16
HELD_OUT = "sft.heldout={path: heldout.jsonl, max_tokens: 64}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a config and its data: answers to be guessed, so that losses stay large."""
    monkeypatch.chdir(tmp_path)
    lines = (QUICKSTART.parent / "quickstart" / "train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines[: ROWS + 16]]
    pairs = [{"prompt": p["prompt"], "response": f"Answer: {p['answer']}"} for p in problems]
    for name, part in (("train", pairs[:ROWS]), ("heldout", pairs[ROWS:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = {
        "name": "warm",
        "seed": 3,
        "device": "cpu",
        "model": {"path": str(QUICKSTART.parent / "quickstart" / "model")},
        "parallel": {"tensor": 2},
        "precision": {"dtype": "float32"},
        "sft": {
            "data": {"path": "train.jsonl", "max_tokens": 64},
            "batch_size": BATCH,
            "epochs": 2.5,
            "every": 3,
        },
        "training": {"tokens_per_microbatch": 128},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "checkpoint": {"every": 3},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def fine_tune(folder: Path, *overrides: str) -> tuple[Command, list[dict[str, Any]]]:
    """A run to its end; its rows, the newest of each step."""
    command = Command(folder, "sft", "sft.yaml", *overrides)
    code, err = command.finish()
    assert code == 0, (command.out.read_text(), err)
    command.assert_nothing_left(60)
    return command, rows_of(folder / "runs" / "warm-001")


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        rows[json.loads(line)["step"]] = json.loads(line)
    return [rows[step] for step in sorted(rows)]


def stop_after(folder: Path, step: int, *overrides: str) -> None:
    """Start a run, and stop it with SIGTERM after a step."""
    command = Command(folder, "sft", "sft.yaml", *overrides)
    command.wait_for_output(f"step {step}/", 300)
    command.process.send_signal(signal.SIGTERM)
    code, err = command.finish()
    assert code == 75, err
    assert "rerun the same command to resume" in err
    command.assert_nothing_left(60)


def check_like(actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for a, b in zip(actual, expected, strict=True):
        for key, value in b.items():
            if key.startswith(("sft/", "policy/loss", "policy/grad_norm", "lr", "step/")):
                assert a[key] == pytest.approx(value, rel=tolerance), (b["step"], key)


def test_a_run_and_one_that_is_stopped_and_goes_on_in_another_layout(folder: Path) -> None:
    command, rows = fine_tune(folder, HELD_OUT)
    total = round(2.5 * ROWS)
    steps = -(-total // BATCH)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert [row["sft/epoch"] * ROWS for row in rows[1:]] == pytest.approx(
        [min(step * BATCH, total) for step in range(1, steps + 1)]
    )
    measured = [row["step"] for row in rows if "sft/heldout_loss" in row]
    assert measured == [0, 3, 6, steps]
    assert rows[-1]["sft/heldout_loss"] < 0.7 * rows[0]["sft/heldout_loss"]
    assert missing_from_page(rows) == set()
    text = command.out.read_text()
    assert "engine" not in text.lower()
    assert "held-out loss" in text
    run = folder / "runs" / "warm-001"
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["steps"] == steps
    for part in ("report.html", f"hf/step_{steps:06d}", "tensorboard"):
        assert (run / part).exists(), part

    run.rename(folder / "straight")
    stop_after(folder, 4, HELD_OUT)
    command, again = fine_tune(folder, HELD_OUT, "parallel={tensor: 1, data: 2}")
    assert "resuming runs/warm-001 from step" in command.out.read_text()
    check_like(again, rows, 1e-4)
    weights = [
        load_file(place / "hf" / f"step_{steps:06d}" / "model.safetensors")
        for place in (folder / "straight", run)
    ]
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).abs().max() < 1e-4, name


def test_mistakes_are_one_line(folder: Path) -> None:
    for overrides, message in {
        (
            "sft=null",
            "data={path: train.jsonl}",
        ): "sft.yaml: has no section sft (docs/warm-start.md); use train",
        (
            "sft.data.max_tokens=4",
        ): "sft.data: no conversation is left to train on (40 too long); raise sft.data",
        ("sft.data.path=none.jsonl",): "none.jsonl does not exist",
        ("sft.data.max_tokens=2048",): "sft.data.max_tokens (2048) is more than the model's 1024 positions",
        ("sft.batch_size=1", "parallel={data: 2}"): "sft.batch_size (1) is less than parallel.data (2)",
        ("sft.data.answer_key=none",): "train.jsonl",
    }.items():
        command = Command(folder, "sft", "sft.yaml", *overrides)
        code, err = command.finish()
        assert code == 2, (overrides, err)
        assert message in err, (overrides, err)
        assert err.count("\n") <= 2, err
    assert not list((folder / "runs").glob("warm-*"))


@pytest.mark.long
def test_kills_at_any_time(folder: Path) -> None:
    """Everything is killed at random moments of a run, and it ends as an undisturbed one, bit for bit."""
    settings = (HELD_OUT, "sft.epochs=5", "checkpoint.every=2")
    _, rows = fine_tune(folder, *settings)
    (folder / "runs" / "warm-001").rename(folder / "straight")
    dice = random.Random(5)
    for _ in range(6):
        command = Command(folder, "sft", "sft.yaml", *settings)
        command.wait_for_output("step ", 300)
        time.sleep(dice.uniform(0, 1.5))
        for pid in [command.process.pid, *command.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.process.wait()
    _, again = fine_tune(folder, *settings)
    check_like(again, rows, 0.0)
    last = f"hf/step_{rows[-1]['step']:06d}/model.safetensors"
    assert (folder / "runs" / "warm-001" / last).read_bytes() == (folder / "straight" / last).read_bytes()


@pytest.mark.long
def test_rejection_sampling_then_rl(folder: Path) -> None:
    """A run's right responses are trained, an engine evaluates, and RL starts from the export."""
    small = ["rollout.prompts_per_step=32", "training.steps=2", "training.minibatches=2", "evaluation=null"]
    command = Command(folder, "train", str(QUICKSTART), *small, "runs=runs")
    assert command.finish()[0] == 0, command.out.read_text()
    heldout = str(QUICKSTART.parent / "quickstart" / "heldout.jsonl")
    evaluation = {
        "data": {"path": heldout, "max_prompt_tokens": 32, "limit": 50},
        "samples": 2,
        "every": 4,
    }
    overrides = ["sft.data={rollouts: runs/quickstart-001, max_tokens: 96}", "optimizer.lr=2e-4"]
    overrides += [f"evaluation={json.dumps(evaluation)}", "rollout.max_response_tokens=64"]
    command = Command(folder, "sft", "sft.yaml", *overrides, "engine={kv_cache_gib: 0.25}")
    code, err = command.finish()
    assert code == 0, (command.out.read_text(), err)
    rows = rows_of(folder / "runs" / "warm-001")
    assert missing_from_page(rows) == set()
    accuracy = [row["eval/heldout/avg@2"] for row in rows if "eval/heldout/avg@2" in row]
    assert accuracy[-1] > accuracy[0] + 0.1, "right responses teach"
    export = max((folder / "runs" / "warm-001" / "hf").iterdir())
    command = Command(
        folder, "train", str(QUICKSTART), *small, "runs=runs", "name=rl", f"model.path={export}"
    )
    assert command.finish()[0] == 0, command.out.read_text()
    rl = rows_of(folder / "runs" / "rl-001")
    assert rl[1]["reward/accuracy"] == pytest.approx(accuracy[-1], abs=0.12)
    command = Command(
        folder, "train", str(QUICKSTART), *small, "runs=runs", "name=x", "--from", "runs/warm-001"
    )
    code, err = command.finish()
    assert code == 2
    assert "was written with other settings" in err


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer={type: schedule_free_adamw, distributed: false, lr: 1.0e-3, warmup_steps: 1}"],
        ["precision={dtype: bfloat16, fp8: {recipe: blockwise}}", "parallel.tensor=1"],
        [f"model.path={QUICKSTART_MOE.parent / 'quickstart' / 'moe_model'}", "parallel={data: 2, expert: 2}"],
        ["parallel={pipeline: 2, virtual: 2, tensor: 1}"],
    ],
    ids=["schedule-free", "fp8", "experts", "virtual stages"],
)
def test_it_learns_with(folder: Path, overrides: list[str]) -> None:
    _, rows = fine_tune(folder, HELD_OUT, *overrides)
    assert rows[-1]["sft/heldout_loss"] < 0.8 * rows[0]["sft/heldout_loss"]

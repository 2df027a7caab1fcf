"""A run started from a converted Megatron checkpoint is the run started from its HF checkpoint.

Why: a converted checkpoint is for training; a run that began with other weights, tokenizer or stop tokens
would not fail, but learn something else. Proved, by the command line on real ranks in fp32: ``model.path``
and ``--from`` of the folder give the same steps at TP1, TP2 and PP2, bit for bit, and the same export; such a
run is planned, resumed, and its checkpoint converted. Long: with engines, which get the weights by the
bridge. Not covered: what each rank reads in other layouts (tests/distributed/test_converted_checkpoints.py).
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from rpg_megatron.commands.convert.command import convert_to_hf, convert_to_megatron, open_hf, open_megatron
from rpg_megatron.launcher.stopping import StopSignals
from tests.support.commands import Command
from tests.support.runs import QUICKSTART

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(900)]

MODEL = QUICKSTART.parent / "quickstart" / "model"
KEYS = ("step", "policy/loss", "policy/grad_norm", "lr")
LAYOUTS = {"tp1": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's model in Megatron's format; ``sft.yaml`` is in the working directory."""
    monkeypatch.chdir(tmp_path)
    lines = (QUICKSTART.parent / "quickstart" / "train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines[:16]]
    rows = [{"prompt": p["prompt"], "response": f"Answer: {p['answer']}"} for p in problems]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "device": "cpu",
        "model": {"path": str(MODEL)},
        "precision": {"dtype": "float32"},
        "sft": {"data": {"path": "train.jsonl", "max_tokens": 64}, "batch_size": 8},
        "training": {"steps": 2},
        "optimizer": {"lr": 1e-3},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    convert_to_megatron(open_hf(MODEL), tmp_path / "megatron", StopSignals())
    return tmp_path / "megatron"


def finish(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a command to its end; the rows of the run, and its exported weights."""
    command = Command(folder, *arguments)
    code, err = command.finish()
    assert code == 0, (command.out.read_text(), err)
    name = next(a.removeprefix("name=") for a in arguments if a.startswith("name="))
    run = folder / "runs" / f"{name}-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows, load_file(next((run / "hf").glob("step_*/model.safetensors")))


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("tp1", "pp2"))]
)
def test_the_first_steps_are_those_from_hugging_faces_files(
    tmp_path: Path, megatron: Path, layout: str
) -> None:
    parallel = f"parallel={json.dumps(LAYOUTS[layout])}"
    expected, weights = finish(tmp_path, "sft", "sft.yaml", parallel, "name=hf")
    start = ["--from", str(megatron)] if layout == "tp2" else [f"model.path={megatron}"]
    rows, ours = finish(tmp_path, "sft", "sft.yaml", parallel, "name=ours", *start)
    assert len(rows) == len(expected) >= 2
    for row, other in zip(rows, expected, strict=True):
        assert {key: row.get(key) for key in KEYS} == {key: other.get(key) for key in KEYS}
    assert all(key in row for key in KEYS)
    assert all((ours[name] == weights[name]).all() for name in weights)


def test_the_run_is_planned_and_resumed_and_its_checkpoint_is_converted(
    tmp_path: Path, megatron: Path
) -> None:
    start = ["sft.yaml", f"model.path={megatron}", "name=ours"]
    for command in (["plan", *start], ["sft", *start, "--dry-run"]):
        planned = Command(tmp_path, *command)
        code, err = planned.finish()
        assert code == 0, err
    first = Command(tmp_path, "sft", *start, "sft.epochs=8")
    first.wait_for_output("step 2/", 300)
    first.process.send_signal(signal.SIGTERM)
    assert first.finish()[0] == 75
    rows, more = finish(tmp_path, "sft", *start, "sft.epochs=8")
    assert [row["step"] for row in rows][-1] == 16
    source = open_megatron(tmp_path / "runs" / "ours-001" / "checkpoints" / "step_000016")
    convert_to_hf(source, tmp_path / "back", StopSignals())
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all((back[name] == more[name].to(back[name].dtype)).all() for name in more)


@pytest.mark.long  # an engine's start
def test_engines_get_the_weights_by_the_bridge(tmp_path: Path, megatron: Path) -> None:
    results = []
    for name, model in (("hf", MODEL), ("ours", megatron)):
        start = [str(QUICKSTART), f"model.path={model}", "training.steps=1", f"name={name}"]
        results.append(finish(tmp_path, "train", *start, "runs=runs"))
    (expected, _), (rows, _) = results
    for key in (*KEYS, "reward/mean", "mismatch/logp_max"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected]

"""The examples of docs/extend.md, as files outside the repository, train as printed.

Proved, with real Megatron in fp32: a loss with metrics of its own, an advantage and a schedule named by
import path train two steps, on responses of which the policy sampled a part; the metrics are in metrics.jsonl
and TensorBoard, the advantage and the learning rates are those of the functions; our losses' metrics are
absent and nothing asks for them. The filter keeps groups with dense rewards. The rewards score, with
stand-ins for their servers, problems of the source of prompts. Long: over four steps the metrics are the same
in each parallel layout, means to 1e-6, and maxima to 1e-5, since a single token's log-prob differs by some
1e-6 in fp32. Not covered: engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core import parallel_state as mpu
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rpg_megatron.config import Settings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.launcher.input_checks import check_custom_code
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.rewards.reward import Response, Scorer
from rpg_megatron.rollout.dynamic_sampling import passes_filter
from rpg_megatron.rollout.groups import scores_of
from rpg_megatron.training.metrics import MetricsWriter
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare
from tests.support.judges import stand_in_judge
from tests.support.layouts import TEMPERATURE, TURNS, make_case, write_rewarded_batch
from tests.support.ranks import ROOT, ranks


def train_one(case: dict[str, Any], folder: Path) -> None:
    """All steps on the fixed batch; rank 0 writes their metrics to FOLDER/NAME."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    trainer = Trainer(settings, mesh, torch.device("cpu"))
    writer = MetricsWriter(folder / case["name"]) if mesh.rank == 0 else None
    for step in range(1, settings.training.steps + 1):
        batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
        trainer.scorer.compute_log_probs(batch)
        trainer.update(step, batch, lambda done, total: None)
        if writer is not None:
            writer.write({"step": step, **batch.metrics})
    if writer is not None:
        writer.close()
    mpu.destroy_model_parallel()


@ranks(1)
def train_all(folder: Path, cases: list[dict[str, Any]]) -> None:
    os.chdir(folder)
    for case in cases:
        train_one(case, folder)


OWN = ("objective/drift", "objective/drift_max", "objective/far")
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
    "CP2": {"context": 2},
}


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configs of the page; its files are written into the working directory."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    for kind, text in blocks:
        if kind == "python":
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    return [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]


@pytest.fixture
def sections(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """The config that trains."""
    config = configs[0]
    config["optimizer"] |= {"distributed": False, "eps": 1e-4}
    config["rollout"] |= {"prompts_per_step": 4, "samples_per_prompt": 3, "temperature": TEMPERATURE}
    config["training"] = {"minibatches": 2, "tokens_per_microbatch": 100, "logprob_chunk": 17}
    return config


def train(
    folder: Path, sections: dict[str, Any], world: int, layouts: dict[str, dict[str, int]], steps: int = 2
) -> dict:
    """Rows of metrics.jsonl of each layout."""
    sections["training"]["steps"] = steps
    cases = [
        make_case(folder / "model", layout, 0, sections) | {"name": name} for name, layout in layouts.items()
    ]
    for name in layouts:
        (folder / name).mkdir()
    train_all(folder, cases, world=world)
    files = {name: folder / name / "metrics.jsonl" for name in layouts}
    return {name: [json.loads(line) for line in f.read_text().splitlines()] for name, f in files.items()}


def check_board(folder: Path, rows: list[dict]) -> None:
    """TensorBoard has what metrics.jsonl has."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    for key in OWN:
        assert [s.value for s in board.Scalars(key)] == pytest.approx([row[key] for row in rows])


def test_the_examples_of_the_page_train(tmp_path: Path, sections: dict[str, Any]) -> None:
    batch = write_rewarded_batch(tmp_path, 3)
    settings = Settings.model_validate(make_case(tmp_path / "model", {}, 0, sections)["settings"])
    check_custom_code(settings)
    groups = [scores_of(batch[i : i + 3]) for i in range(0, 12, 3)]
    assert all(passes_filter(settings.rollout, group) for group in groups), "dense rewards, all of them wrong"

    rows = train(tmp_path, sections, 1, {"TP1": {}})["TP1"]
    assert [row["lr"] for row in rows] == [1e-3, 5e-4]
    for row in rows:
        assert {key for key in row if key.startswith(("objective/", "kl/", "ratio/", "correction/"))} == {
            *OWN
        }
        assert 0 < row["objective/drift"] < row["objective/drift_max"]
    rewards = np.array([t.reward for t in batch])
    lengths = np.array([sum(TURNS.get(i, (len(t.response),))[::2]) for i, t in enumerate(batch)])
    advantages = (rewards - rewards.reshape(4, 3).mean(1).repeat(3)) / np.sqrt(lengths)
    # At the first update the ratio is 1, and the mean |loss| of both updates is close to that of |A|.
    expected = (np.abs(advantages) * lengths).sum() / lengths.sum()
    assert rows[0]["policy/loss_abs"] == pytest.approx(expected, rel=0.1)
    check_board(tmp_path / "TP1", rows)


def test_the_rewards_and_prompts_of_the_page(configs: list[dict[str, Any]]) -> None:
    terms: dict[str, Any] = {}
    for config in configs:
        terms |= config.get("reward", {}).get("terms", {})
    assert list(terms) == ["right", "length", "unlike", "judge", "classifier"]
    with stand_in_judge() as judge:
        terms["judge"]["url"], terms["classifier"]["url"] = judge.url, f"{judge.url}/classify"
        settings = Settings.model_validate(configs[-1] | {"reward": {"terms": terms}, "model": {"path": "m"}})
        problems = read_problems(settings.data, rows=settings.reward.has_custom)
        assert len(problems) == 5000
        first = problems[0]
        assert first == read_problems(settings.data, rows=True)[0]
        assert first.row == {"prompt": first.text, "answer": int(first.answer), "level": 3}
        context = json.dumps({"prompt": first.text, "messages": [], "row": first.row})
        texts, lengths = [f"Answer: {a}" for a in (first.answer, first.answer, -1)], (120, 60, 120)
        responses = [Response(t, np.zeros(n, np.int32), "stop") for t, n in zip(texts, lengths, strict=True)]
        responses[0] = responses[0]._replace(finish="length")
        scorer = Scorer(settings.reward, 200)
        try:
            scores = asyncio.run(scorer.score(responses, first.answer, context))
        finally:
            scorer.close()
    assert all(f"Problem: {first.text}\nSolution: {text}\n" in judge.question(text) for text in texts)
    parts = {name: [score.parts[name] for score in scores] for name in terms}
    assert parts["right"] == [1.0, 1.0, -1.0]
    assert parts["length"] == [0.0, 0.5, 1.0]
    assert parts["unlike"] == [0.5, 0.5, 1.0]
    assert parts["judge"] == [0.0] * 3, "a score above the highest is none"
    assert parts["classifier"] == [0.75] * 3


@pytest.mark.long  # four more layouts; the default tier has one, and test_layouts has our own losses in all
def test_own_metrics_are_the_same_in_every_layout(tmp_path: Path, sections: dict[str, Any]) -> None:
    write_rewarded_batch(tmp_path, 3)
    expected = train(tmp_path, sections, 1, {"TP1": {}}, steps=4)["TP1"]
    assert len(expected) == 4
    gaps: dict[str, float] = dict.fromkeys(OWN, 0.0)
    for name, rows in train(tmp_path, sections, 2, LAYOUTS, steps=4).items():
        for row, expected_row in zip(rows, expected, strict=True):
            for key in OWN:
                tolerance = 1e-5 if key.endswith("_max") else 1e-6
                gaps[key] = max(gaps[key], abs(row[key] - expected_row[key]))
                assert row[key] == pytest.approx(expected_row[key], rel=0, abs=tolerance), (name, key)
        check_board(tmp_path / name, rows)
    print(gaps)

"""``rpg-megatron eval`` with a real engine: its figures, interruption and resuming, nothing left behind.

Why: the figures are what a model is judged by, so they are computed again here, from the responses on
disk and by other means; and an evaluation that is ended must neither lose what it has nor leave processes.
The quickstart's model. Not covered: GPUs, tensor parallelism, models that need hours.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.commands.sample_live import print_live_samples
from rpg_megatron.config import UserError, load_settings
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.rewards import grade
from tests.support.commands import Command, read_proc_file
from tests.support.run_checkpoints import write_step
from tests.support.runs import find_core

pytestmark = pytest.mark.usefixtures("forked_starts")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
N, FEWER = 4, 2
"""Responses per problem of the sets ``a`` and ``sums``."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A small evaluation on two sets that takes a few seconds once its engine is up."""
    lines = (QUICKSTART / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:24]))
    (tmp_path / "b.jsonl").write_text("".join(lines[24:40]))
    files = ["--data", str(tmp_path / "a.jsonl"), "--data", f"sums={tmp_path / 'b.jsonl'}"]
    sizes = ["engine.max_sequences=4", "engine.kv_cache_gib=0.25", "--max-response-tokens", "48"]
    return [
        "eval",
        str(QUICKSTART / "model"),
        *files,
        *sizes,
        "--device",
        "cpu",
        "-n",
        str(N),
        "-n",
        f"sums={FEWER}",
        "--seed",
        "5",
    ]


def rows(folder: Path, name: str) -> list[dict]:
    file = folder / f"{name}.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def wait_for_results(evaluation: Command, folder: Path, count: int) -> None:
    end = time.monotonic() + 500
    while sum(len(rows(folder, name)) for name in ("a", "sums")) < count:
        assert evaluation.process.poll() is None, evaluation.finish()
        assert time.monotonic() < end
        time.sleep(0.02)


def pass_by_enumeration(flags: list[bool], k: int) -> float:
    draws = list(itertools.combinations(flags, k))
    return sum(map(any, draws)) / len(draws)


def majority(row: dict) -> bool:
    answers = [a for a in row["extracted"] if a is not None]
    if not answers:
        return False
    votes = Counter(answers)
    first = max(votes.values())
    winner = next(a for a in answers if votes[a] == first)
    return row["correct"][row["extracted"].index(winner)]


def assert_figures(figures: dict, graded: list[dict], n: int) -> None:
    assert (figures["problems"], figures["samples"]) == (len(graded), n)
    expected = {f"avg@{n}": statistics.mean(sum(r["correct"]) / n for r in graded)}
    expected |= {
        f"pass@{k}": statistics.mean(pass_by_enumeration(r["correct"], k) for r in graded)
        for k in (1, 2, 4)
        if k <= n
    }
    expected[f"maj@{n}"] = statistics.mean(majority(r) for r in graded)
    assert {key: part["value"] for key, part in figures["metrics"].items()} == pytest.approx(expected)
    for part in figures["metrics"].values():
        assert part["low"] <= part["value"] <= part["high"]
    lengths = [length for r in graded for length in r["lengths"]]
    assert figures["length"] == pytest.approx(
        {
            "mean": statistics.mean(lengths),
            "p50": statistics.median(lengths),
            "p99": np.quantile(lengths, 0.99),
            "max": max(lengths),
        }
    )
    assert figures["truncated"]["frac"] == sum(f == "length" for r in graded for f in r["finishes"]) / len(
        lengths
    )


def assert_graded(folder: Path, name: str, data: Path) -> None:
    """Every problem is there once, in order, with its verdicts."""
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    graded = rows(folder, name)
    assert [r["prompt_id"] for r in graded] == list(range(len(problems)))
    for row, problem in zip(graded, problems, strict=True):
        assert (row["prompt"], row["answer"]) == (problem["prompt"], problem["answer"])
        verdicts = [grade(text, problem["answer"]) for text in row["responses"]]
        assert row["correct"] == [v.correct for v in verdicts]
        assert row["extracted"] == [v.extracted for v in verdicts]


def test_an_interrupted_evaluation_resumes_with_right_figures(
    command, options: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options += ["--out", str(out)]
    evaluation: Command = command(*options)
    wait_for_results(evaluation, out, 3)
    segments = evaluation.shared_memory()
    os.kill(evaluation.process.pid, signal.SIGTERM)
    code, err = evaluation.finish(timeout=120)
    assert code == 75, err
    assert "problems graded so far: " in err
    evaluation.assert_nothing_left()
    assert [file for file in segments if file.exists()] == []
    before = {name: rows(out, name) for name in ("a", "sums")}
    assert 3 <= sum(map(len, before.values())) < 40
    assert not (out / "summary.json").exists()

    refused: Command = command(*options, "--temperature", "0.5")
    code, err = refused.finish()
    assert (code, refused.out.read_text()) == (2, "")
    assert "evaluation.temperature: 1.0 -> 0.5" in err

    again: Command = command(*options, "--json")
    code, progress = again.finish(timeout=600)
    assert code == 0, progress
    again.assert_nothing_left()
    summary = json.loads(again.out.read_text())
    assert summary["folder"] == str(out)
    for name, data, n in (("a", "a.jsonl", N), ("sums", "b.jsonl", FEWER)):
        graded = rows(out, name)
        assert_figures(summary["sets"][name], graded, n)
        assert_graded(out, name, tmp_path / data)
        assert all(row in graded for row in before[name]), "what was graded is kept, not sampled again"
    assert summary["sets"]["a"]["metrics"][f"avg@{N}"]["value"] > 0.1, "it has learnt some sums"


@pytest.mark.long
@pytest.mark.parametrize(
    ("prompt", "pattern"),
    [
        (None, r"prompt 0, answer \d+\n  Compute .*\n-- response 0: (correct|wrong), \d+ tokens"),
        ("Compute 1+1+1", r"prompt 0, no answer\n  Compute 1\+1\+1\n-- response 0: \d+ tokens"),
    ],
)
def test_new_responses_of_a_run_are_sampled_and_graded(
    tmp_path: Path, prompt: str | None, pattern: str
) -> None:
    run = tmp_path / "runs" / "a-001"
    shutil.copytree(QUICKSTART / "model", run / "hf" / "step_000002")
    (run / "config.yaml").write_text(resolved_yaml(load_settings(QUICKSTART.with_suffix(".yaml"))))
    text = [] if prompt is None else ["--prompt", prompt]
    sample = Command(tmp_path, "sample", str(run), "--live", "--step", "2", "-n", "3", *text)
    code, err = sample.finish()
    assert code == 0, err
    assert re.search(pattern, sample.out.read_text())
    assert sample.out.read_text().count("-- response") == 3
    sample.assert_nothing_left()


@pytest.mark.parametrize(
    ("step", "message"), [(7, "no checkpoint of step 7; there are: step_000002"), (None, "is not")]
)
def test_what_cannot_be_sampled_is_one_message(tmp_path: Path, step: int | None, message: str) -> None:
    run = tmp_path / "a-001"
    (run / "hf" / "step_000002").mkdir(parents=True)
    if step is not None:
        (run / "config.yaml").write_text(resolved_yaml(load_settings(QUICKSTART.with_suffix(".yaml"))))
    else:
        (run / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        print_live_samples(run, step, None, 3)


@pytest.mark.long
def test_a_checkpoint_of_a_run_is_converted_for_the_engines(
    command, options: list[str], tmp_path: Path
) -> None:
    """The weights are the quickstart's model's, so the responses are; the copy is gone at the end."""
    code, err = command(*options, "--out", str(tmp_path / "hf")).finish(timeout=600)
    assert code == 0, err
    megatron = ["--hf", str(QUICKSTART / "model"), "--out", str(tmp_path / "megatron")]
    code, err = command("convert", "hf-to-megatron", *megatron).finish(timeout=300)
    assert code == 0, err
    step = write_step(tmp_path / "r-001", 3, QUICKSTART / "model", tmp_path / "megatron" / "release")
    evaluation: Command = command(options[0], str(step), *options[2:], "--out", str(tmp_path / "out"))
    code, err = evaluation.finish(timeout=600)
    assert code == 0, err
    evaluation.assert_nothing_left()
    assert str(step) in evaluation.out.read_text()
    for name in ("a", "sums"):
        same = [
            a == b for a, b in zip(rows(tmp_path / "hf", name), rows(tmp_path / "out", name), strict=True)
        ]
        assert sum(same) >= 0.9 * len(same)  # a batch of another size may round another way
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["launcher", "evaluator", "engine", "core"])
def test_whatever_is_killed_nothing_is_left_and_the_samples_stay_the_same(
    command, options: list[str], tmp_path: Path, victim: str
) -> None:
    whole: Command = command(*options, "--out", str(tmp_path / "whole"))
    code, err = whole.finish(timeout=600)
    assert code == 0, err
    assert "avg@4" in whole.out.read_text()
    out = tmp_path / "out"
    options += ["--out", str(out)]
    evaluation: Command = command(*options, "engine.health_timeout=20")
    wait_for_results(evaluation, out, 3)
    pids = {"launcher": evaluation.process.pid}
    for pid in evaluation.processes():
        words = read_proc_file(pid, "cmdline").split(b"\0")
        if b"rpg_megatron.commands.eval.process" in words:
            pids["evaluator"] = pid
        if b"rpg_megatron.engine.server" in words:
            pids["engine"] = pid
    if victim == "core":  # it hangs, but its server still answers
        os.kill(find_core(pids["engine"]), signal.SIGSTOP)
    else:
        os.kill(pids[victim], signal.SIGKILL)
    code, err = evaluation.finish(timeout=120)
    assert code == (-9 if victim == "launcher" else 1), err
    if victim != "launcher":
        assert "rerun the same command to resume" in err
        # The launcher may not have seen yet that the engine, which has answered, is up.
        reasons = {"engine": "engine 0 (died|ended while starting)", "evaluator": "evaluator was killed"}
        assert re.search(reasons.get(victim, "engine 0 hangs: "), err)
    evaluation.assert_nothing_left(30)
    again: Command = command(*options, "--engines", "2")
    code, err = again.finish(timeout=600)
    assert code == 0, err
    again.assert_nothing_left()
    for name in ("a", "sums"):
        same = [a == b for a, b in zip(rows(tmp_path / "whole", name), rows(out, name), strict=True)]
        assert sum(same) >= 0.9 * len(same)  # a batch of another size may round another way

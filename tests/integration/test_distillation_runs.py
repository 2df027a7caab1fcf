"""Distillation by the command line: a teacher on the ranks or behind a vLLM server, resumed in other layouts.

Proved, on real ranks and engines: a teacher behind a real vLLM server and the same one held by the ranks
train the same steps; a student moves towards a teacher of another shape, by sampled and by exact divergences;
a run that is stopped goes on in another layout with the same numbers; a server that dies ends the run with a
message, and a teacher with another tokenizer is refused before anything starts.
All of it is long; the default tier has a run with a teacher in test_training.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.commands import Command
from tests.support.metrics_page import missing_from_page
from tests.support.ranks import free_port
from tests.support.runs import QUICKSTART

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(1200)]

MODEL = QUICKSTART.parent / "quickstart" / "model"
SMALL = ["rollout.prompts_per_step=16", "training.minibatches=2", "evaluation=null", "runs=runs", "anchor={}"]
SMALL += ["engine={max_sequences: 128, kv_cache_gib: 0.25}", "training.steps=4", "checkpoint.every=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def teacher(folder: Path) -> Path:
    """A Llama of another shape with the quickstart's tokenizer. It has learnt nothing."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "rope_theta": 500.0}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=304, max_position_embeddings=256, **sizes, **heads, **ends)
    place = folder / "teacher"
    LlamaForCausalLM(config).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, place)
    return place


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    command = Command(folder, "train", str(QUICKSTART), *SMALL, f"name={name}", *overrides)
    code, err = command.finish()
    assert code == 0, (command.out.read_text(), err)
    command.assert_nothing_left(60)
    return rows_of(folder, name)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = {}
    for line in (folder / "runs" / f"{name}-001" / "metrics.jsonl").read_text().splitlines():
        rows[json.loads(line)["step"]] = json.loads(line)
    found = [rows[step] for step in sorted(rows)]
    assert missing_from_page(found) == set()
    return found[1:]


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[tuple[str, subprocess.Popen[Any]]]:
    """A vLLM server of the model, and its URL."""
    port = free_port()
    arguments = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                *arguments,
                "--max-model-len",
                "128",
            ],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(240):
            assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/models", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url, server
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def check_alike(actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for a, b in zip(actual, expected, strict=True):
        for key in ("policy/loss", "kl/anchor", "policy/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=1e-6 if tolerance else 0.0), (
                b["step"],
                key,
            )


def test_a_server_teaches_what_held_ranks_teach(folder: Path, teacher: Path) -> None:
    objective = "objective={type: distil, form: sequence, clip: null}"
    held = train(folder, "held", objective, f"teacher={{path: {teacher}}}")
    with serving(folder, teacher) as (url, server):
        served = train(
            folder, "served", objective, f"teacher={{url: '{url}'}}", "parallel.tensor=2", "rollout.workers=2"
        )
        check_alike(served, held, 1e-3)
        assert all(row["reward/failed_frac"] == 0 for row in served)

        top = "objective={type: distil, form: top_k, clip: null}", f"teacher={{url: '{url}', top_k: 8}}"
        likeliest = train(folder, "top", *top, "optimizer.lr=1e-9")[0]
        full = f"teacher={{path: {teacher}}}", "objective={type: distil, form: full, clip: null}"
        exact = train(folder, "full", *full, "optimizer.lr=1e-9")[0]
        assert 0 < likeliest["kl/anchor"] < exact["kl/anchor"], "a lower bound"

        command = Command(
            folder, "train", str(QUICKSTART), *SMALL, "name=lost", objective, f"teacher={{url: '{url}'}}"
        )
        command.wait_for_output("step 1/", 300)
        os.killpg(server.pid, signal.SIGKILL)
        code, err = command.finish()
        assert code == 2, err
        assert "the reward failed on" in err
        assert "teacher" in err
        command.assert_nothing_left(60)


@pytest.mark.parametrize("objective", ["{form: full}", "{form: full, divergence: fkl}", "{form: token}"])
def test_the_student_moves_to_a_teacher_of_another_shape(folder: Path, teacher: Path, objective: str) -> None:
    settings = (
        f"objective={{type: distil, {objective[1:]}",
        f"teacher={{path: {teacher}}}",
        "optimizer.lr=1e-3",
    )
    rows = train(folder, "moves", *settings, "training.steps=10")
    print([round(row["kl/anchor"], 3) for row in rows])
    assert rows[-1]["kl/anchor"] < (0.95 if "token" in objective else 0.8) * rows[0]["kl/anchor"]


def test_killed_or_stopped_and_resumed(folder: Path, teacher: Path) -> None:
    """Killed, in the same layout bit for bit; stopped, in another one to rounding."""
    settings = "objective={type: distil, form: full}", f"teacher={{path: {teacher}}}"
    expected = train(folder, "whole", *settings)
    command = Command(folder, "train", str(QUICKSTART), *SMALL, "name=killed", *settings)
    command.wait_for_output("step 2/", 300)
    for pid in [command.process.pid, *command.processes()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.process.wait()
    check_alike(train(folder, "killed", *settings), expected, 0.0)

    command = Command(folder, "train", str(QUICKSTART), *SMALL, "name=stopped", *settings)
    command.wait_for_output("step 2/", 300)
    command.process.send_signal(signal.SIGTERM)
    assert command.finish()[0] == 75
    actual = train(folder, "stopped", *settings, "parallel={tensor: 1, pipeline: 2}")
    check_alike(actual, expected, 1e-3)


def test_another_tokenizer_is_refused(folder: Path, teacher: Path) -> None:
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(tokenizer))
    objective = "objective={type: distil}"
    command = Command(folder, "train", str(QUICKSTART), *SMALL, objective, f"teacher={{path: {teacher}}}")
    code, err = command.finish()
    assert code == 2
    assert "is not the policy's in" in err
    assert "the token '1' is" in err
    assert not (folder / "runs").exists()

"""Bad input ends in one clear message and a non-zero exit; no process is left and nothing half-written.

Why: this is what a user meets first, and what a cluster meets when a job is cancelled. Through the real
command line, with the real engine where one is started. A run whose engine has two workers is killed (kill -9
of the launcher) in the middle of training; until then it trains as it should. Not covered: other deaths in
the middle of training (test_launcher, test_resume).
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.commands import Command, wait_for_our_code
from tests.support.forking import forked_starts


def cuda_is_here() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


@pytest.fixture
def broken(tmp_path: Path, checkpoint: Path) -> Path:
    """A copy of the checkpoint to break."""
    return shutil.copytree(checkpoint, tmp_path / "broken")


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["training.stepz=3"], ["unknown key 'training.stepz'", "'training.steps'"]),
        (["model.path=/nowhere/model"], ["/nowhere/model", "not a directory"]),
        (["parallel.tensor=3"], ["parallel", "key/value heads", "tensor=3"]),
        (["parallel.pipeline=3"], ["pipeline=3", "2 layers"]),
        (["engine.tensor=3"], ["engine", "tensor=3"]),
        (["parallel.data=16"], ["mini-batch holds 8", "parallel.data (16)"]),
        (["rollout.max_response_tokens=500"], ["512 positions"]),
        (["data.path=/nowhere/data.jsonl"], ["/nowhere/data.jsonl", "does not exist"]),
        (
            ["evaluation.data={path: /nowhere/held.jsonl, max_prompt_tokens: 64}"],
            ["evaluation.data.path: /nowhere/held.jsonl"],
        ),
        (["reward.type=nomod:nope"], ["reward.type: nomod:nope: there is no module 'nomod'"]),
        pytest.param(
            ["device=cuda"],
            ["device"],
            marks=pytest.mark.skipif(cuda_is_here(), reason="this machine has a GPU"),
        ),
    ],
)
def test_what_is_found_before_anything_starts(
    command, config_file: Path, overrides: list[str], messages: list[str]
):
    check_refused(command, config_file, messages, *overrides)


def check_refused(
    command: Callable[..., Command], config_file: Path, messages: list[str], *overrides: str
) -> None:
    with forked_starts():
        train = command("train", str(config_file), *overrides)
    code, err = train.finish()
    assert code == 2, err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert [text for text in messages if text not in err] == [], err
    train.assert_nothing_left()
    assert not (config_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (lambda m: _truncate(m / "model.safetensors"), ["model.safetensors", "truncated or corrupt"]),
        (lambda m: (m / "model.safetensors").unlink(), ["model.safetensors"]),
        (lambda m: (m / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
        (lambda m: (m / "tokenizer.json").unlink(), ["tokenizer"]),
    ],
    ids=["truncated weights", "no weights", "broken config.json", "no tokenizer"],
)
def test_a_damaged_model(command, config_file: Path, broken: Path, damage, messages: list[str]):
    damage(broken)
    check_refused(command, config_file, messages, f"model.path={broken}")


def test_weights_of_another_size_than_config_json_says(
    command, config_file: Path, tmp_path: Path, make_checkpoint
):
    model = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2}))
    check_refused(command, config_file, ["layers.1."], f"model.path={model}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer"\n', "bad.jsonl:2"),
        ('{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "2+2"}\n', "bad.jsonl:3"),
        ("", "bad.jsonl"),
        ("\n\n", "bad.jsonl"),
    ],
    ids=["not JSON", "a key missing", "empty", "empty lines"],
)
def test_a_bad_data_set(command, config_file: Path, tmp_path: Path, content: str, message: str):
    (tmp_path / "bad.jsonl").write_text(content)
    check_refused(command, config_file, [message], f"data.path={tmp_path}/bad.jsonl")


def test_an_engine_that_does_not_come_up_shows_its_log(command, config_file: Path):
    # The option is valid, but no sequence fits into such a cache.
    with forked_starts():
        train = command("train", str(config_file), "engine.arguments=[--kv-cache-memory-bytes=4096]")
        code, err = train.finish()
    assert code == 2, err
    assert err.startswith("error: engine 0 ")
    assert "ValueError: No available memory for the cache blocks." in err
    assert "Traceback" not in err
    log = config_file.parent / "runs" / "tiny-001" / "logs" / "engine_0.log"
    assert str(log) in err
    assert log.is_file()
    train.assert_nothing_left()


def test_an_engine_that_is_too_slow_is_ended(command, config_file: Path):
    train = command("train", str(config_file), "engine.start_timeout=3")
    code, err = train.finish()
    assert code == 2, err
    assert "engine.start_timeout" in err
    train.assert_nothing_left()


# When the engine is up, the next test kills it; test_launcher has more, with stand-ins.
@pytest.mark.parametrize(
    "seconds", [1.0, *(pytest.param(seconds, marks=pytest.mark.long) for seconds in (0.3, 6.0, 20.0))]
)
def test_ctrl_c_while_starting(command, config_file: Path, seconds: float):
    # Enough steps that a fast machine still trains when the signal comes.
    train = command("train", str(config_file), "training.steps=100000")
    wait_for_our_code(train.process)
    time.sleep(seconds)
    files = train.shared_memory()
    train.process.send_signal(signal.SIGINT)
    code, err = train.finish()
    assert code in (130, -signal.SIGINT), err  # the second: between two blocks that guard imports
    assert code != 130 or err.startswith("stopped: Ctrl-C")
    train.assert_nothing_left()
    assert [file for file in files if file.exists()] == []


@pytest.mark.parametrize(
    ("number", "code", "start"),
    [
        pytest.param(signal.SIGTERM, 75, "spawned", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, "spawned", marks=pytest.mark.long),
        (signal.SIGKILL, -signal.SIGKILL, "forked"),
    ],
)
def test_a_signal_when_the_engine_is_up(
    command, config_file: Path, number: signal.Signals, code: int, start: str
):
    """With two engine workers: they outlive their server by default and leave files in shared memory."""
    with forked_starts() if start == "forked" else nullcontext():
        train = command("train", str(config_file), "engine.tensor=2", "training.steps=100000")
    train.wait_for_output("step 2/100000", 500)
    files = train.shared_memory()
    # vLLM's workers share memory only in its build for AVX-512.
    assert [f for f in files if "cpushm" in f.name] or "avx512f" not in Path("/proc/cpuinfo").read_text()
    train.process.send_signal(number)
    returned, _ = train.finish()
    assert returned == code
    train.assert_nothing_left(60)
    assert [file for file in files if file.exists()] == []
    metrics = config_file.parent / "runs" / "tiny-001" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[:3]]
    assert all(row["mismatch/logp_max"] <= 1e-3 and row["sync/bytes"] > 0 for row in rows[1:])

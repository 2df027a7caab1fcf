"""Fixtures of all tests: one thread per process, a small checkpoint, files to train on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

# Before anything imports torch: tests start several processes, whose OpenMP threads would stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background of a script has SIGINT ignored, and would hand that down to commands under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import yaml

from tests.support.tiny_models import write_byte_model

# The duration of an example depends on the load of the machine.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """``write_byte_model``, for tests that need a model of another shape."""
    return write_byte_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of a tiny random Qwen3. Shared: do not write to it."""
    return write_byte_model(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def config_file(tmp_path: Path, checkpoint: Path) -> Path:
    """A YAML file of a tiny CPU run, with its data beside it; runs go to ``runs`` in the same folder."""
    lines = [json.dumps({"prompt": f"What is {i}+{i}?", "answer": str(2 * i)}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "name": "tiny",
        "runs": str(tmp_path / "runs"),
        "device": "cpu",
        "model": {"path": str(checkpoint)},
        "precision": {"dtype": "float32"},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 128},
        "training": {"steps": 2, "minibatches": 2},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 16},
        "engine": {"max_sequences": 16, "kv_cache_gib": 0.25},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file

"""Runs with adapters: faults of the engine are found by the guard, and responses continue over updates.

Whole runs by the command line. A plug-in makes vLLM bind or apply the adapters wrongly, and switches off
the check of the slots, which would name each fault itself (test_lora_engine). Then the guard stops the run:
before the first step, by its probes with known adapters, although the run's own B is zero; or in the step
after the update from which on the engine keeps older adapters. A run that samples two updates ahead trains,
with responses of several versions, and the guard compares the tokens of each version. Colocated engines keep
the model's weights while they sleep: a plug-in throws weights away at sleep level 2, as a GPU does.
Kills and resumes: test_kills (layout ``adapters``), test_resume_layouts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from tests.support.engine import install_plugin
from tests.support.lora_faults import FAULTS
from tests.support.runs import QUICKSTART, TrainCommand
from tests.support.tiny_models import write_byte_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SMALL = [
    "training.steps=3",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "engine.max_sequences=16",
    "engine.kv_cache_gib=0.25",
    "engine.restarts=0",
    "evaluation=null",
    "lora={rank: 8, alpha: 16}",
    "optimizer.lr=1e-2",
]


class Run(TrainCommand):
    def __init__(self, folder: Path, *overrides: str):
        super().__init__(folder, folder / "lora-001", *SMALL, f"runs={folder}", "name=lora", *overrides)

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *((fault, "float32") for fault in ("base", "stale name", "alpha", "swapped", "half", "late older")),
        *((fault, "bfloat16") for fault in ("base", "alpha")),
    ],
)
def test_the_guard_finds_faults_that_the_engine_serves(
    fault: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = install_plugin(tmp_path / "plugin", "faults", FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(plugin), prepend=":")
    monkeypatch.setenv("RPG_TEST_FAULT", f"unchecked {fault}")
    model = ["parallel.tensor=1", f"precision.dtype={dtype}"]
    if fault == "swapped":  # needs as many keys as queries
        write_byte_model(tmp_path / "model", num_key_value_heads=4)
        model.append(f"model.path={tmp_path / 'model'}")
    run = Run(tmp_path, *model)
    code, err = run.finish()
    output = run.out.read_text() + err
    assert code == (1 if fault == "stale name" else 2), output
    if fault == "stale name":  # vLLM has no adapter of the name that requests have, and dies
        assert "adapters-come-over-the-bridge" in output, output
    else:
        early = "before step 1: known adapters (lora) change the trainer's log-probs by" in output
        assert early == (fault != "late older"), output
        assert early or "step 2: engine and trainer disagree" in output, output
    run.assert_nothing_left()


DISCARDS = """
import os
from pathlib import Path

def register():
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self, level=1):
        with Path(os.environ["RPG_TEST_SLEPT"]).open("a") as out:
            out.write(f"{level}\\n")
        for parameter in self.model_runner.model.parameters() if level == 2 else ():
            parameter.data.fill_(float("nan"))

    CPUWorker.sleep = sleep
"""


def test_colocated_engines_keep_the_model_whose_adapters_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = install_plugin(tmp_path / "plugin", "discards", DISCARDS)
    monkeypatch.setenv("PYTHONPATH", str(plugin), prepend=":")
    monkeypatch.setenv("RPG_TEST_SLEPT", str(tmp_path / "slept"))
    run = Run(tmp_path, "parallel.tensor=1", "engine.colocated=true", "optimizer.lr=1e-3")
    code, err = run.finish(900)
    assert code == 0, run.out.read_text() + err
    first, *later = (tmp_path / "slept").read_text().split()  # before it has weights; in each step
    assert first == "2"
    assert len(later) >= 3
    assert set(later) == {"1"}
    assert all(row["mismatch/logp_max"] <= 1e-4 for row in run.rows()[1:])
    run.assert_nothing_left()


def test_responses_continue_over_updates_of_adapters(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        "parallel.tensor=1",
        "training.steps=6",
        "rollout.ahead=2",
        "correction.type=truncate",
        "engine.max_sequences=2",
        "optimizer.lr=1e-3",
    )
    code, err = run.finish(900)
    assert code == 0, run.out.read_text() + err
    mixed = 0
    for row in run.rows()[1:]:
        assert row["async/probe_tokens"] > 0
        assert row["mismatch/logp_max"] <= 1e-4, row
        for t in read_rollouts(rollouts_file(run.run, int(row["step"]))):
            assert t.versions.max() < row["step"]
            mixed += len(set(t.versions.tolist())) > 1
    assert mixed > 0
    run.assert_nothing_left()


def test_two_workers_serve_the_adapters_of_a_mixture(tmp_path: Path) -> None:
    """Workers are processes of their own, which check no configuration."""
    run = Run(
        tmp_path,
        f"model.path={QUICKSTART.parent / 'quickstart' / 'moe_model'}",
        "parallel={data: 2, expert: 2}",
        "engine.tensor=2",
        "lora={rank: 8, alpha: 16, targets: [q_proj, k_proj, v_proj, o_proj]}",
        "optimizer.lr=1e-3",
    )
    code, err = run.finish(900)
    assert code == 0, run.out.read_text() + err
    assert all(row["mismatch/logp_max"] <= 1e-4 for row in run.rows()[1:])
    run.assert_nothing_left()

"""Whole runs of a hybrid of linear and softmax attention, by the command line, on two trainer ranks.

Why: a state that outlives its sequence, a rate that is rounded in a checkpoint, or a partial response that is
continued from a wrong state would show only as a run that learns a little worse. Proved in float32 with the
quickstart's hybrid: a run that is killed with SIGKILL in a random moment of step 5 resumes and ends bit by
bit as an undisturbed one, and transformers loads its export; with ``rollout.ahead: 2`` engines agree with the
trainer also on responses that weight updates interrupted, which continue a partial response. Not covered:
GPUs, other layouts (tests/distributed), engines alone (test_hybrid_engines).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.ahead_runs import LARGEST, count_mixed
from tests.support.runs import QUICKSTART, STEPS, Run

MODEL = QUICKSTART.parent / "quickstart" / "hybrid_model"
HYBRID = [f"model.path={MODEL}", "parallel.sequence=true"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.usefixtures("forked_starts")]


def test_a_killed_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    straight, killed = Run(tmp_path, "straight"), Run(tmp_path, "killed")
    straight.start(*HYBRID)
    straight.finish()
    killed.start(*HYBRID)
    killed.wait_in_step(5)
    killed.kill()
    killed.start(*HYBRID)
    killed.finish()
    killed.assert_like(straight)
    export = killed.folder / "hf" / f"step_{STEPS:06d}"
    loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
    weights, before = load_file(export / "model.safetensors"), load_file(MODEL / "model.safetensors")
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    unchanged = [name for name, weight in weights.items() if torch.equal(weight, before[name])]
    assert unchanged == []


def test_partial_responses_are_continued(tmp_path: Path) -> None:
    run = Run(tmp_path, "ahead")
    run.start(*HYBRID, "rollout.ahead=2", "correction.type=truncate")
    run.finish()
    assert count_mixed(run.folder) > 0
    assert all(row["mismatch/logp_max"] < LARGEST for row in run.rows()[1:])

"""Routes of a real engine, replayed by real trainers: a whole run, and log-probs in two precisions.

Why: that vLLM returns the experts it used, for the tokens it used them for, also on a CPU, where it captures
none by itself, is true only of the pinned version. All of it is long: it starts engines. Not covered: GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.mismatch import measure_replay
from rpg_megatron.data.rollout_files import has_routes, read_rollouts, rollouts_file
from tests.support.commands import Command
from tests.support.tiny_models import write_byte_model

pytestmark = pytest.mark.usefixtures("forked_starts")

SETTINGS = [
    "parallel.pipeline=2",
    "memory.recompute=full",
    "optimizer.lr=1e-3",
    "training={router_replay: rollout, steps: 3, minibatches: 2, tokens_per_microbatch: 256}",
    "rollout.journal_routes=[3]",
    "rollout.ahead=1",
    "rollout.max_response_tokens=48",
    "correction.type=truncate",
    "checkpoint={every: 1, keep: 9}",
]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_a_run_replays_routes_and_can_be_replayed(config_file: Path, tmp_path: Path, family: str) -> None:
    """In float32 engine and trainer choose the same experts as long as the weights are the same."""
    dense = {} if family == "deepseek_v3" else {"mlp_only_layers": [0]}  # its first layer is dense
    model = write_byte_model(tmp_path / "moe", family=family, num_hidden_layers=4, **dense)
    command = Command(tmp_path, "train", str(config_file), f"model.path={model}", *SETTINGS)
    code, err = command.finish(timeout=3000)
    assert code == 0, err
    run = tmp_path / "runs" / "tiny-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    assert rows[0]["routes/changed"] == 0  # the first batch is of the first weights
    assert all(row["mismatch/logp_max"] < 1e-4 for row in rows)  # probes, whose routes are replayed too
    for name in ("replayed", "own"):
        assert all(row[f"routes/{name}_mismatch_max"] < 1e-4 for row in rows), name
    assert [has_routes(rollouts_file(run, step)) for step in (1, 2, 3)] == [False, False, True]
    for t in read_rollouts(rollouts_file(run, 3)):
        assert t.routes.shape == (t.length - 1, 3, 2)
        assert (np.diff(np.sort(t.routes, -1)) > 0).all()
    again = [sys.executable, "-m", "rpg_megatron.cli", "replay", str(run)]
    layout = ["parallel.pipeline=1", "parallel.data=2", "parallel.expert=2"]
    done = subprocess.run([*again, "--step=3", "--json", *layout], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["match"], report
    assert max(report["max_difference"].values()) < 1e-5
    for key in ("policy/loss", "policy/grad_norm"):
        pair = report["metrics"][key]
        assert pair["replay"] == pytest.approx(pair["run"], rel=1e-5, abs=1e-6), key
    refused = subprocess.run([*again, "--step=2"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "step_000002.parquet: has no routes" in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_removes_what_other_experts_cause(tmp_path: Path, dtype: str) -> None:
    row = measure_replay(tmp_path / dtype, dtype, responses=4)
    if dtype == "float32":
        assert row.changed == 0
        assert row.own == row.replayed
        assert row.replayed[2] < 1e-4
    else:
        assert 0 < row.changed < row.changed_tokens < 0.5
        for routed, replayed in zip(row.own, row.replayed, strict=True):
            assert replayed < routed
        assert row.replayed[2] < 0.5 * row.own[2]

"""Training on a CPU: real Megatron ranks, a real vLLM server, the bridge between them.

Proved: after every sync the engine's log-probs of the tokens it sampled equal the trainer's to 1e-3 in fp32,
in each trainer layout (a few in the default tier) and with the engine at TP2; engines that were fed from
different layouts sample the same tokens, and the first update's gradient norm agrees over layouts to 1e-5; a
guard stops a run whose engine disagrees; distilled from itself, a policy has nothing to learn. One engine
serves all layouts, and trainer ranks start without the launcher there, to save time. A whole run by the
command line, whose export gives the same log-probs in transformers and in vLLM, is long: test_resume has such
a run with all other checks of it, test_rollout_engine has an export in vLLM, test_bad_input has an engine at
TP2. Not covered: GPUs, several nodes, resuming.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rpg_megatron.config import load_settings
from rpg_megatron.data.rollout_files import read_rollouts
from rpg_megatron.engine.client import EngineClient, Sample
from rpg_megatron.launcher.run_dir import CONFIG, resolved_yaml
from tests.support.engine import Service, running_engines
from tests.support.metrics_page import missing_from_page
from tests.support.runs import QUICKSTART, SERVED
from tests.support.timed_runs import check_plan_from

pytestmark = pytest.mark.usefixtures("forked_starts")

MODEL = QUICKSTART.parent / "quickstart" / "model"
LAYOUTS = {
    "TP1": [],
    "TP2": ["parallel.tensor=2"],
    "TP2+SP": ["parallel.tensor=2", "parallel.sequence=true"],
    "PP2": ["parallel.pipeline=2"],
    "PP2xVPP2": ["parallel.pipeline=2", "parallel.virtual=2"],
    "DP2": ["parallel.data=2"],
    "CP2": ["parallel.context=2"],
    "TP2xPP2": ["parallel.tensor=2", "parallel.pipeline=2"],
    "TP2+SP, shared prompts": ["parallel.tensor=2", "parallel.sequence=true", "training.share_prompts=true"],
}
FEW = ("TP2+SP", "PP2xVPP2")
"""Layouts of the default tier; test_bridge_vllm has the other cases of a sync."""


def start_ranks(service: Service, name: str, overrides: list[str]) -> tuple[list[int | None], str]:
    """Run trainer ranks against the service until they end; their exit codes and the ends of their logs."""
    settings = load_settings(QUICKSTART, [*SERVED, *overrides])
    return service.run_ranks("rpg_megatron.training.rank", settings, service.folder / name)


def train(service: Service, name: str, overrides: list[str]) -> list[dict]:
    """Train one layout to its end; the rows of metrics.jsonl."""
    codes, logs = start_ranks(service, name, overrides)
    assert set(codes) == {0}, logs
    lines = (service.folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert missing_from_page(rows) == set()
    return rows


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(LAYOUTS), marks=pytest.mark.long)], ids=["few", "all"]
)
def test_layouts_serve_what_they_train_and_agree(service: Service, names: tuple[str, ...]) -> None:
    norms, first_rollouts = {}, {}
    for name in names:
        rows = train(service, f"{len(names)}-{name}", LAYOUTS[name])
        assert [r["step"] for r in rows] == [0, 1, 2], name
        for row in rows[1:]:  # step 1 proves the first sync, step 2 the one after the update
            assert row["mismatch/logp_max"] <= 1e-3, (name, row)
            assert row["mismatch/stale_tokens"] == 0, name
            assert row["mismatch/tokens"] > 300, name
            assert ("step/shared_tokens" in row) == ("shared" in name)
        norms[name] = rows[1]["policy/grad_norm_first"]
        run, settings = (
            service.folder / f"{len(names)}-{name}",
            load_settings(QUICKSTART, [*SERVED, *LAYOUTS[name]]),
        )
        (run / CONFIG).write_text(resolved_yaml(settings))  # the launcher's part
        check_plan_from(run, settings, rows[2]["time/step"])
        rollouts = read_rollouts(run / "rollouts" / "step_000001.parquet")
        first_rollouts[name] = [t.response.tolist() for t in rollouts]
        assert norms[name] > 0, name
    for name in names:
        same = first_rollouts[name] == first_rollouts[names[0]]
        assert same, f"{name}: the engine sampled other tokens"
        assert norms[name] == pytest.approx(norms[names[0]], rel=1e-5), norms


def test_the_guard_stops_a_run_whose_engine_disagrees(service: Service) -> None:
    codes, logs = start_ranks(service, "guard", ["guards.mismatch_max=1e-12"])
    assert codes == [2], logs
    last = logs.strip().splitlines()[-1]
    assert last.startswith("error: step 1: engine and trainer disagree")
    # No update was made, and what the message speaks of can be looked up.
    rows = [json.loads(row) for row in (service.folder / "guard" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert "mismatch/logp_max" in rows[1]
    assert "policy/grad_norm" not in rows[1]
    assert len(read_rollouts(service.folder / "guard" / "rollouts" / "step_000001.parquet")) == 32


def test_averaged_weights_a_held_anchor_and_a_correction(service: Service) -> None:
    """Schedule-Free: rollouts, old log-probs and syncs use the same point, or the mismatch would show it."""
    overrides = [
        "parallel.data=2",
        "optimizer={type: schedule_free_adamw, lr: 1e-3, distributed: false}",
        "objective={divergence: ufkl, estimator: differentiable, beta: 0.1}",
        "anchor={type: every, updates: 4}",
        "correction={type: truncate}",
        "training.steps=3",
    ]
    rows = train(service, "schedule-free", overrides)
    assert all(row["mismatch/logp_max"] <= 1e-3 for row in rows[1:])
    assert [row["kl/anchor_refreshes"] for row in rows[1:]] == [0, 1, 1]  # 2 updates a step
    assert all(row["correction/ratio_mean"] == pytest.approx(1, abs=1e-3) for row in rows[1:])
    folder = service.folder / "schedule-free" / "rollouts"
    lags = [
        any((t.old != t.anchor).any() for t in read_rollouts(folder / f"step_00000{step}.parquet"))
        for step in (1, 2, 3)
    ]
    assert lags == [
        False,
        True,
        False,
    ]  # the initial weights; one step behind them; moved to the present ones


def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(service: Service) -> None:
    """The exact divergence to itself is zero, and has no gradient."""
    settings = ["objective={type: distil, form: full}", f"teacher={{path: {MODEL}}}", "parallel.tensor=2"]
    settings.append("optimizer.lr=1e-9")  # AdamW would make whole steps of rounding
    rows = train(service, "distil", settings)
    assert [r["step"] for r in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert abs(row["kl/anchor"]) < 1e-6
        assert row["policy/grad_norm"] < 1e-3
        assert abs(row["policy/loss"]) < 1e-6


@pytest.mark.long  # two starts of an engine; the module's docstring says where its parts are proved
def test_a_run_by_the_command_line_and_its_checkpoint(tmp_path: Path) -> None:
    overrides = [
        f"runs={tmp_path}",
        "name=cli",
        "training.steps=2",
        "rollout.prompts_per_step=16",
        "engine.tensor=2",
        "engine.kv_cache_gib=0.25",
        "evaluation.data.limit=40",
    ]
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(QUICKSTART), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out accuracy" in done.stdout
    lines = done.stdout.splitlines()
    assert lines.index("waiting for engines") < lines.index("evaluation") < lines.index("sync")

    run = tmp_path / "cli-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert 0.15 < rows[0]["eval/heldout/avg@2"] < 0.55
    assert all(r["mismatch/logp_max"] <= 1e-3 for r in rows[1:])
    assert all(r["sync/bytes"] > 0 for r in rows[1:])
    for part in ("config.yaml", "summary.json", "rollouts/step_000002.parquet", "logs", "tensorboard"):
        assert (run / part).exists(), part

    timeline = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    phases = [(r["step"], r["phase"]) for r in timeline if "phase" in r]
    for step in (1, 2):
        of_step = [phase for number, phase in phases if number == step]
        assert of_step[:5] == ["collect", "logprobs", "update", "sync", "step"]
    assert (0, "evaluation") in phases
    assert any(row["running"][0] for row in timeline if "running" in row)

    # The exported checkpoint, read by transformers and served by vLLM: the same log-probs of the same tokens.
    export = run / "hf" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64).eval()
    before = AutoModelForCausalLM.from_pretrained(QUICKSTART.parent / "quickstart" / "model").state_dict()
    assert any((before[k] != v.float()).any() for k, v in model.state_dict().items()), "nothing was learnt"
    settings = load_settings(QUICKSTART, [f"model.path={export}", "engine.kv_cache_gib=0.25"])
    prompt = read_rollouts(run / "rollouts" / "step_000002.parquet")[0].prompt
    with running_engines(tmp_path, [settings], weights="checkpoint", fresh=True) as (engine,):
        samples = ask(EngineClient(0, engine.process.socket, engine.token, timeout=120), prompt, 4)
    for sample in samples:
        whole = torch.tensor(np.concatenate([prompt, sample.tokens]), dtype=torch.long)
        with torch.no_grad():
            logits = model(whole[None, :-1]).logits[0, len(prompt) - 1 :]
        expected = torch.log_softmax(logits, -1).gather(1, whole[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)


def ask(client: EngineClient, prompt: np.ndarray, count: int) -> list[Sample]:
    async def go() -> list[Sample]:
        try:
            return await client.generate(prompt, n=count, max_tokens=48, temperature=1.0, seed=5)
        finally:
            await client.close()

    return asyncio.run(go())


GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.mark.long
@pytest.mark.skipif(not GSM8K.exists(), reason=f"GSM8K is not at {GSM8K}")
def test_real_problems_take_the_same_path(tmp_path: Path) -> None:
    """The tiny model fails them all; nothing else may fail."""
    config = QUICKSTART.parent / "gsm8k_smoke.yaml"
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(config)]
    command += [f"data.path={GSM8K}", f"runs={tmp_path}", "name=gsm8k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "gsm8k-001" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(r["mismatch/logp_max"] <= 1e-3 for r in rows[1:])
    assert (tmp_path / "gsm8k-001" / "hf" / "step_000002" / "model.safetensors").exists()

"""Runs with tools, whole: a taskset of verifiers with its tool, and programs that attack what runs them.

Why: each part has tests of its own; here an update, a sync and a checkpoint happen between the calls. Real
engines and two ranks. Not covered: kills (test_kills), GPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from tests.support.commands import Command
from tests.support.ranks import ROOT
from tests.support.sandboxes import ENDED, REFUSED

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.long, pytest.mark.timeout(1800)]
VENV = ROOT / ".venv-verifiers"
HOSTILE = """
import json
from pathlib import Path
from rpg_megatron.environments.tools import ToolUse
from rpg_megatron.rollout.episode import Episode

PROGRAMS = json.loads(Path(__file__).with_name("programs.json").read_text())
TOOLS = ToolUse(tools=[{"python": {"seconds": 1.5, "memory_mib": 128, "processes": 16, "files_mib": 8}}])


async def attack(task, generate, score):
    toolbox = TOOLS.make()
    try:
        turn = await generate(task.prompt, max_tokens=8)
        for number in range(4):
            code = PROGRAMS[(4 * task.seed + number) % len(PROGRAMS)]
            said = await toolbox.call("python", json.dumps({"code": code}))
            assert len(said) < 9000
        await generate(turn.context + task.encode("Go on. "), max_tokens=8)
    finally:
        toolbox.close()
    return Episode(len(turn.tokens) / 10, toolbox.metrics)
"""
SETTINGS = [
    "training={steps: 4, minibatches: 2, tokens_per_microbatch: 1000}",
    "parallel.data=2",
    "rollout.workers=2",
    "optimizer.lr=1e-3",
]


def read(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


def left(folder: Path) -> list[str]:
    """Processes that have the folder in an environment variable: all of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(folder) in v for v in process.environ().values()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_two_hundred_hostile_programs(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    programs = [code for code, _ in ENDED.values()] + list(REFUSED.values())
    for name, value in (("OUTSIDE", repr(str(secret))), ("PID", str(os.getpid())), ("PORT", "9")):
        programs = [code.replace(name, value) for code in programs]
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = [*SETTINGS, "rollout.episode={type: hostile:attack, workers: 2}"]
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=1500)
    assert code == 0, err
    rows = read(tmp_path / "runs" / "tiny-001")
    assert len(rows) == 4
    calls = 16 * sum(row["env/python_calls"] for row in rows)
    ended = 16 * sum(row["env/python_errors"] for row in rows)
    print(f"{calls:.0f} calls, {ended:.0f} ended")
    assert calls == 4 * 16 * 4
    # All that go on are ended. Others may be too: on a busy machine they take longer.
    assert ended >= 0.9 * calls * len(ENDED) / len(programs)
    for row in rows:
        assert row["mismatch/logp_max"] < 1e-4
    assert left(tmp_path) == []
    assert secret.read_text() == "secret"


@pytest.mark.skipif(not (VENV / ".complete").exists(), reason="run make .venv-verifiers")
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_taskset_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """The example, four steps; with ``ahead``, updates come between the turns of its chats."""
    monkeypatch.setenv("RPG_TEST_FOLDER", str(tmp_path))
    episode = f"{{type: rpg_megatron.environments.verifiers:play, venv: {VENV}, workers: 2}}"
    settings = [*SETTINGS, f"data.source.venv={VENV}", f"rollout.episode={episode}"]
    settings += ["rollout.prompts_per_step=8", f"rollout.ahead={ahead}", f"runs={tmp_path / 'runs'}"]
    settings += ["correction.type=truncate"] * (ahead > 0)
    code, err = Command(tmp_path, "train", str(ROOT / "examples" / "calculator.yaml"), *settings).finish(1500)
    assert code == 0, err
    run = tmp_path / "runs" / "calculator-001"
    rows = read(run)
    assert len(rows) == 4
    tickets: list[int] = []
    for row in rows:
        step = int(row["step"])
        group = read_rollouts(rollouts_file(run, step))
        tickets += sorted({t.ticket for t in group})
        assert len(group) == 64
        for t in group:
            assert t.reward == float(t.text.rpartition("\n")[2].strip() == t.answer)
            assert (t.versions[t.mask] >= step - 1 - ahead).all()
            fresh = t.mask & (t.versions == step - 1)
            assert np.abs(t.old - t.behaviour)[fresh].max(initial=0.0) < 1e-4
        assert 0.3 < row["env/calculator_calls"] <= 1
        assert (row["env/branches"], row["env/retokenized"], row["env/unknown_tool_calls"]) == (0, 0, 0)
    assert tickets == list(range(32))
    assert left(tmp_path) == []

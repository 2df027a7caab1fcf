"""A judge on a second, real vLLM server, which is slow, hangs and dies while a real run trains.

Why: the judge is the one part of a run that others operate. Its failures must cost scores, be
counted response by response, and with ``guards.reward_failures: warn`` never end the run; its key must be in
no file. Not covered: what a judge's scores are good for, servers that answer garbage (test_custom_rewards).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rpg_megatron.config import load_settings
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from rpg_megatron.engine.command import engine_environment
from tests.support.runs import QUICKSTART, SERVED, TrainCommand
from tests.support.same_runs import read_rows

KEY = "a-key-of-the-judge"
STEPS = 60
"""More than a fast machine takes while a failing judge is skipped."""
RESPONSES = 32
FAILED = 0.25
"""Score of a failure: no score of the judge."""


@pytest.fixture
def judge(tmp_path: Path, checkpoint: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server's process, in a group of its own, and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--chat-template", str(template), "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)]
    settings = load_settings(QUICKSTART, ["engine.cpu_threads=1"])
    environment = engine_environment(settings, 0, tmp_path, "unused") | {"VLLM_API_KEY": KEY}
    log = (tmp_path / "judge.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1800):
            assert process.poll() is None, (tmp_path / "judge.log").read_text()
            try:
                httpx.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield process, f"{url}/v1"
    finally:
        send(process, signal.SIGKILL)
        process.wait()
        log.close()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@pytest.mark.long  # two real vLLM servers and a run; the stand-in judges of test_custom_rewards are quick
def test_a_run_goes_on_whatever_its_judge_does(
    tmp_path: Path, judge: tuple[subprocess.Popen[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    process, url = judge
    terms = (
        "{right: {type: answer_line, wrong: 0.0}, judge: {type: 'rpg_megatron.rewards.judge:Judge', "
        f"weight: 0.5, failed: {FAILED}, url: '{url}', model: judge, key_variable: JUDGE_KEY, "
        "question: 'Rate {response} for {prompt}', max_tokens: 16, temperature: 1.0, "
        "body: {structured_outputs: {choice: ['Score: 3', 'Score: 7']}}, "
        "timeout: 8, retries: 1, backoff: 0.1, rest_after: 6, rest: 4}}"
    )
    run = tmp_path / "runs" / "judged-001"
    changes = [f"training.steps={STEPS}", f"runs={run.parent}", "name=judged", f"reward.terms={terms}"]
    changes.append("guards.reward_failures=warn")
    train = TrainCommand(tmp_path, run, *SERVED, *changes, "export.enabled=false")

    def row(step: int) -> dict[str, float]:
        train.wait(lambda: len(read_rows(run)) > step)  # that of step 0 comes before
        return read_rows(run)[step]

    try:
        assert row(1)["reward/judge/failures"] == 0
        send(process, signal.SIGSTOP)  # slow: it answers within the time limit
        time.sleep(2)
        send(process, signal.SIGCONT)
        row(len(read_rows(run)) + 1)
        send(process, signal.SIGSTOP)  # it hangs
        hanging = len(read_rows(run)) + 1  # the step after the present one
        row(hanging)
        send(process, signal.SIGCONT)
        back = next(i for i in range(hanging, STEPS - 1) if row(i)["reward/judge/failures"] == 0)
        send(process, signal.SIGKILL)  # it crashes
        code, err = train.finish(1200)
    finally:
        for pid in train.processes():
            os.kill(pid, signal.SIGKILL)
    assert code == 0, train.out.read_text() + err
    rows = read_rows(run)
    assert len(rows) == 1 + STEPS
    for number, metrics in enumerate(rows[1:], 1):
        counts = {name.removeprefix("reward/judge/"): v for name, v in metrics.items() if "/judge/" in name}
        print(f"step {number}: judge {metrics['reward/judge']:.3f}, {counts}")
        scores = [t.parts["judge"] for t in read_rollouts(rollouts_file(run, number))]
        assert len(scores) == RESPONSES
        assert scores.count(FAILED) == counts["failures"] == metrics["reward/errors"]
        assert {s for s in scores if s != FAILED} <= {0.3, 0.7}
        assert sum(scores) / RESPONSES == pytest.approx(metrics["reward/judge"])
        assert counts["requests"] >= RESPONSES - counts["skipped"]
        assert (counts["tokens"] > 0) == (counts["failures"] < RESPONSES)
    assert [r["reward/judge/failures"] for r in rows[1 : hanging - 1]] == [0] * (hanging - 2)
    assert sum(r["reward/judge/timeouts"] for r in rows[hanging - 1 : hanging + 1]) > 0
    assert rows[hanging]["reward/judge/failures"] == RESPONSES
    assert rows[back]["reward/judge/failures"] == 0
    assert rows[-1]["reward/judge/failures"] == RESPONSES
    assert sum(r["reward/judge/errors"] for r in rows[back + 1 :]) > 0
    holding = [file for file in run.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert holding == []

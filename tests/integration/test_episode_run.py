"""Environments and agents, each one file outside the repository, train with a real engine.

Why: a later turn's log-probs agree only if engine and trainer have the same tokens before it, in the same
positions; with experts also only if the routes of all turns are joined correctly. Two turns; a history that
is rewritten; an agent with OpenAI's client at the gateway. Not covered: GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.config import load_settings
from rpg_megatron.data.prompts import codec_of, load_tokenizer
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from tests.support.chat_models import write_chat_tokenizer
from tests.support.commands import Command
from tests.support.tiny_models import CONFIGS, write_byte_model

pytestmark = pytest.mark.usefixtures("forked_starts")

ENVIRONMENT = """
from rpg_megatron.rollout.episode import Episode


async def two_turns(task, generate, score, *, question: str = "And again? "):
    first = await generate(task.prompt, max_tokens=20)
    second = await generate(first.context + task.encode(question))
    return Episode(reward=(len(first.tokens) + len(second.tokens)) / 100)
"""
SETTINGS = [
    "rollout.episode=two_turns:two_turns",
    "rollout.max_response_tokens=48",
    "training={steps: 4, minibatches: 2, tokens_per_microbatch: 256}",
    "optimizer.lr=1e-3",
]
LAYOUTS = {
    "TP2": ["parallel.tensor=2"],
    "DP2": ["parallel.data=2", "rollout.workers=2"],
    "routes of experts": [
        "parallel.data=2",
        "parallel.expert=2",
        "training.router_replay=rollout",
        "rollout.journal_routes=1",
    ],
    "routes, ahead": [
        "parallel.data=2",
        "training.router_replay=rollout",
        "rollout.journal_routes=1",
        "rollout.ahead=1",
        "correction.type=truncate",
    ],
}


@pytest.mark.long  # starts an engine for each layout
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_turns_train_and_can_be_replayed(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    (tmp_path / "two_turns.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    settings = [str(config_file), *SETTINGS, *LAYOUTS[layout]]
    if "routes" in layout:
        settings.append(f"model.path={write_byte_model(tmp_path / 'moe', **CONFIGS['qwen3_moe'])}")
    code, err = Command(tmp_path, "train", *settings).finish(timeout=1500)
    assert code == 0, err
    run = tmp_path / "runs" / "tiny-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    between = codec_of(load_tokenizer(load_settings(run / "config.yaml").model.path)).encode("And again? ")
    assert len(between) == 11
    for step in range(1, 5):
        (row,) = (row for row in rows if row["step"] == step and "policy/loss" in row)
        group = read_rollouts(rollouts_file(run, step))
        assert len(group) == 16
        for t in group:
            assert t.response[~t.mask].tolist() == between
            place = int(np.flatnonzero(~t.mask)[0])
            assert 1 <= place <= 20
            assert t.mask.tolist() == [True] * place + [False] * 11 + [True] * (len(t.response) - place - 11)
            assert t.reward == pytest.approx(t.sampled / 100)
            fresh = t.mask & (t.versions == step - 1)
            if "routes" in layout and (t.versions[t.mask] < step - 1).any():
                continue  # interrupted: the engine computed the tokens before the update with other routes
            assert np.abs(t.old - t.behaviour)[fresh].max(initial=0.0) < 1e-4
        assert row["mismatch/logp_max"] < 1e-4
        assert row["response/length_mean"] == pytest.approx(np.mean([t.sampled for t in group]))
        assert row["step/tokens"] == sum(t.length for t in group)
    command = [sys.executable, "-m", "rpg_megatron.cli", "replay", str(run), "--step=4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["match"], done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_evaluation_samples_episodes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each response has both turns, and the episode's reward decides whether it is correct."""
    (tmp_path / "two_turns.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    problems = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(3)]
    (tmp_path / "sayings.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    options = [
        str(checkpoint),
        "--data",
        str(tmp_path / "sayings.jsonl"),
        "-n",
        "2",
        "--max-response-tokens",
        "48",
    ]
    options += ["--device", "cpu", "--out", str(tmp_path / "out"), "engine.kv_cache_gib=0.25"]
    code, err = Command(tmp_path, "eval", *options, "rollout.episode=two_turns:two_turns").finish(timeout=500)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "out" / "sayings.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert [text.count("And again? ") for text in row["responses"]] == [1, 1]
        assert row["correct"] == [True, True]
        assert all(2 <= length <= 48 - 11 for length in row["lengths"])


PROBLEMS = "rpg_megatron.environments.reasoning_gym:problems"
GYM = {"chain_sum": {"max_digits": 1, "max_terms": 3}, "count_bits": {}, "gcd": {"max_value": 20}}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_problems_of_reasoning_gym_train(config_file: Path, tmp_path: Path) -> None:
    """Four steps of three generators; each reward is what the generator's grader says of the response."""
    library = pytest.importorskip("reasoning_gym")
    source = json.dumps({"type": PROBLEMS, "generators": GYM, "count": 20})
    settings = ["data.path=null", f"data.source={source}"]
    settings += ["rollout.episode={type: 'rpg_megatron.environments.reasoning_gym:play', tag: ''}"]
    settings += ["data.max_prompt_tokens=400", "evaluation=null", *SETTINGS[1:], "rollout.prompts_per_step=6"]
    settings += ["training.tokens_per_microbatch=1000", "parallel.data=2"]
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=1500)
    assert code == 0, err
    run = tmp_path / "runs" / "tiny-001"
    graders = {name: library.create_dataset(name, seed=0, size=20, **config) for name, config in GYM.items()}
    of_prompt = {
        problem["question"]: (name, dataset, problem)
        for name, dataset in graders.items()
        for problem in dataset
    }
    codec = codec_of(load_tokenizer(load_settings(run / "config.yaml").model.path))
    seen = set()
    for step in range(1, 5):
        for t in read_rollouts(rollouts_file(run, step)):
            name, dataset, problem = of_prompt[codec.decode(t.prompt.tolist())]
            seen.add(name)
            assert t.answer == problem["answer"]
            assert t.reward == dataset.score_answer(t.text.strip(), problem)
            assert t.correct == (t.reward == 1)
            assert t.parts["env/no_answer"] == 0
    assert seen == set(GYM)


REWRITING = """
from rpg_megatron.rollout.episode import Episode


async def rewriting(task, generate, score):
    first = await generate(task.prompt, max_tokens=12)
    await generate(task.prompt + first.tokens[6:] + task.encode("And?"), max_tokens=12, branch=True)
    last = await generate(first.context + task.encode("Go on. "), max_tokens=12)
    return Episode(reward=float(len(set(last.tokens))))
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_rewritten_history_trains_and_can_be_replayed(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each response has two rows; the last one continues the first turn."""
    (tmp_path / "rewriting.py").write_text(REWRITING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    settings = [*SETTINGS[1:], "rollout.episode=rewriting:rewriting", "parallel.data=2", "rollout.ahead=1"]
    settings += ["correction.type=truncate", "training.minibatches=1"]
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=1500)
    assert code == 0, err
    run = tmp_path / "runs" / "tiny-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in range(1, 5):
        (row,) = (row for row in rows if row["step"] == step and "policy/loss" in row)
        group = read_rollouts(rollouts_file(run, step))
        assert [(t.sample, t.branch) for t in group] == [
            (n, b) for _ in range(4) for n in range(4) for b in (0, 1)
        ]
        for other, whole in zip(group[::2], group[1::2], strict=True):
            parts = [int(np.flatnonzero(np.diff(t.mask)).size) + 1 for t in (other, whole)]
            assert parts == [2, 3]  # own tokens and a turn; a turn, own tokens and a turn
            assert not other.mask[0]
            assert (other.reward, other.advantage) == (whole.reward, whole.advantage)
        assert row["env/branches"] == 1
        assert row["mismatch/logp_max"] < 1e-4
        sampled = [a.sampled + b.sampled for a, b in zip(group[::2], group[1::2], strict=True)]
        assert row["response/length_mean"] == pytest.approx(np.mean(sampled))
        assert row["step/tokens"] == sum(t.length for t in group)
    command = [sys.executable, "-m", "rpg_megatron.cli", "replay", str(run), "--step=4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["match"], done.stdout


AGENT = """
from openai import AsyncOpenAI
from rpg_megatron.rollout.episode import Episode

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def agent(base_url, api_key, question):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": question}]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[LOOK], max_tokens=12
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "nothing"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "And?"})
    return message.content or ""


async def episode(task, generate, score):
    return Episode(reward=float(len(await agent(task.base_url, task.api_key, task.text))))
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_agent_with_the_openai_client_trains(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps with weight updates in mid-turn, and vLLM's parser of tool calls."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    model = write_byte_model(tmp_path / "chat", vocab_size=400)
    write_chat_tokenizer(model, "qwen2.5")
    settings = [f"model.path={model}", "rollout.episode=my_agent:episode", "rollout.tool_call_parser=hermes"]
    settings += [
        "rollout.max_response_tokens=380",
        "training={steps: 4, minibatches: 2, tokens_per_microbatch: 1000}",
    ]
    settings += ["rollout.workers=2", "rollout.ahead=1", "correction.type=truncate", "optimizer.lr=1e-3"]
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=1500)
    assert code == 0, err
    run = tmp_path / "runs" / "tiny-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in range(1, 5):
        (row,) = (row for row in rows if row["step"] == step and "policy/loss" in row)
        group = read_rollouts(rollouts_file(run, step))
        assert len(group) == 16
        for t in group:
            assert int(np.flatnonzero(np.diff(t.mask)).size) == 4  # three turns
            assert (t.versions[t.mask] >= step - 2).all()
        assert row["mismatch/logp_max"] < 1e-4
        assert (row["env/branches"], row["env/retokenized"]) == (0, 0)

"""A model learns to solve tasks in images: from reference solutions, then from the tests' rewards.

Why: that the parts work does not show that what they give can be learnt from, nor that a recorded reward
belongs to the recorded commands. Thirty tasks; the calculator's model, fine-tuned on their solutions until it
solves some; then ten steps of reinforcement learning, at three seeds. The commands of each recorded episode
are run again. Not covered: tasks of real software, which no model of this size solves.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import statistics
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rpg_megatron.environments.harbor import HarborSettings, edit_file, open_task, shell
from rpg_megatron.environments.harbor_tasks import read_task
from rpg_megatron.environments.tools import Toolbox, function_tool
from tests.support.commands import Command
from tests.support.harbor_tasks import write_task
from tests.support.images import make_root
from tests.support.ranks import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing"),
]
WORDS = ["red", "blue", "green", "black", "white", "pink"]
KINDS = {
    "Write {0} to a.": ("echo {0} > a", '[ "$(cat a)" = {0} ]'),
    "Make the folder {0}.": ("mkdir {0}", "[ -d {0} ]"),
    "Make an empty file {0}.": ("touch {0}", "[ -f {0} ]"),
    "Link {0} to a.": ("ln -s a {0}", '[ "$(readlink {0})" = a ]'),
    "Count {0} in a.": ("grep -c {0} /etc/words > a", '[ "$(cat a)" = "$(grep -c {0} /etc/words)" ]'),
}
"""Instruction, solution, and the condition that the tests check."""
SETTINGS = """
device: cpu
precision: {dtype: float32}
training: {tokens_per_microbatch: 4096, logprob_chunk: 4096}
"""
WAYS = ("{}", "cd /tmp; {}", "")
"""Of a chat that the model is shown: the solution, in the wrong folder, and no call."""
STEPS, BATCH = 10, (10, 8)
"""Of a run: steps, and tasks and samples of each."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks, their image, chats, and the two configurations."""
    place = tmp_path_factory.mktemp("learning")
    root = make_root(place / "root")
    (root / "etc/words").write_text("".join(f"{word}\n" * n for n, word in enumerate(WORDS, 1)))
    with (place / "solutions.jsonl").open("w") as chats:
        for n, (ask, (solve, condition)) in enumerate(KINDS.items()):
            for word in WORDS:
                instruction, solution = ask.format(word), solve.format(word)
                test = f"cd /app\n{condition.format(word)}"
                write_task(
                    place / "tasks", f"{n}-{word}", condition=test, solve=solution, instruction=instruction
                )
                for way in WAYS:
                    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
                    if way:
                        function = {"name": "shell", "arguments": {"command": way.format(solution)}}
                        calls = [{"type": "function", "function": function}]
                        messages += [
                            {"role": "assistant", "content": "", "tool_calls": calls},
                            {"role": "tool", "content": ""},
                        ]
                    messages.append({"role": "assistant", "content": "done"})
                    chats.write(json.dumps({"messages": messages}) + "\n")
    (place / "tasks/images.json").write_text(json.dumps({"shell": str(root)}))
    (place / "sft.yaml").write_text(
        SETTINGS
        + f"""
name: solutions
seed: 17
runs: {place / "runs"}
model: {{path: {ROOT / "examples/calculator/model"}}}
sft:
  data: {{path: {place / "solutions.jsonl"}, chat: true, max_tokens: 200}}
  batch_size: 30
  epochs: 40
optimizer: {{lr: 2.0e-3, warmup_steps: 5}}
"""
    )
    (place / "rl.yaml").write_text(
        SETTINGS.replace("{tok", "{minibatches: 5, tok")
        + f"""
runs: {place / "runs"}
model: {{path: {place / "runs/solutions-001/hf/step_000120"}}}
data:
  source: {{type: "rpg_megatron.environments.harbor:problems", folder: {place / "tasks"}}}
  max_prompt_tokens: 64
rollout:
  prompts_per_step: {BATCH[0]}
  samples_per_prompt: {BATCH[1]}
  max_response_tokens: 160
  tool_call_parser: hermes
  episode:
    type: "rpg_megatron.environments.harbor:play"
    cache: {place / "cache"}
    system: ""
    max_turns: 4
    deadline: 600
optimizer: {{lr: 1.0e-4, warmup_steps: 1}}
objective:
  divergence: urkl
  estimator: reinforce
  beta: 1.0e-4
  clip: {{kind: dual, low: 0.2, high: 0.28, c: 10.0}}
engine: {{max_sequences: 80, kv_cache_gib: 0.25}}
"""
    )
    code, err = Command(place, "train", str(place / "sft.yaml")).finish()
    assert code == 0, err
    return place


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Sandboxes of a process belong to one event loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises(place: Path, loop: asyncio.Runner, seed: int) -> None:
    settings = [f"name=rl{seed}", f"seed={seed}", f"training.steps={STEPS}"]
    code, err = Command(place, "train", str(place / "rl.yaml"), *settings).finish(timeout=1500)
    assert code == 0, err
    files = sorted((place / f"runs/rl{seed}-001/rollouts").glob("*.parquet"))
    steps = [pq.read_table(file).to_pylist() for file in files]
    assert [len(rows) for rows in steps] == [BATCH[0] * BATCH[1]] * STEPS
    first, last = ([row["reward"] for rows in some for row in rows] for some in (steps[:3], steps[-3:]))
    print(seed, [round(statistics.mean(row["reward"] for row in rows), 3) for rows in steps])
    error = sum(statistics.variance(rewards) / len(rewards) for rewards in (first, last)) ** 0.5
    assert 0.2 <= statistics.mean(row["reward"] for row in steps[0]) <= 0.5
    assert statistics.mean(last) - statistics.mean(first) > 2 * error
    loop.run(run_again(place, [row for rows in steps for row in rows]))


async def run_again(place: Path, rows: list[dict[str, Any]]) -> None:
    """The recorded calls of each episode give the recorded reward, in a sandbox of their own."""
    tokenizer = AutoTokenizer.from_pretrained(place / "runs/solutions-001/hf/step_000120")
    settings = HarborSettings(cache=str(place / "cache"))

    async def reward_of(row: dict[str, Any]) -> tuple[float, int]:
        task = read_task(str(place / "tasks" / row["answer"]), str(place / "root"))
        async with open_task(task, settings) as opened:
            tools = [function_tool(shell(opened, 60), "shell"), function_tool(edit_file(opened), "edit_file")]
            toolbox = Toolbox(tools)
            for name, arguments in calls_of(row, tokenizer):
                await toolbox.call(name, arguments)
            tested = await opened.test()
        metrics = toolbox.metrics
        return tested.reward or 0.0, int(sum(metrics[key] for key in COUNTED))

    for start in range(0, len(rows), 32):
        some = rows[start : start + 32]
        again = await asyncio.gather(*map(reward_of, some))
        parts = [dict(row["parts"]) for row in some]
        counted = [int(sum(part[f"env/{key}"] for key in COUNTED)) for part in parts]
        assert again == list(zip((row["reward"] for row in some), counted, strict=True))


COUNTED = ("shell_calls", "edit_file_calls", "unknown_tool_calls")


def calls_of(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Names and arguments of the calls that a policy has written. None of a turn in which one is no JSON."""
    for own, tokens in groupby(zip(row["mask"], row["response"], strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in tokens]) if own else ""
        try:
            calls = [
                json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
            ]
            yield from [(call["name"], json.dumps(call["arguments"])) for call in calls]
        except (ValueError, KeyError, TypeError):
            continue

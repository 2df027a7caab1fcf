"""A real run at 8K tokens on a CPU: responses of 8,192 tokens sampled by vLLM and trained on by two ranks.

Why: long sequences are where memory and positions go wrong. The episode continues a response after its end,
so every one reaches the limit, in about thirty turns. Proved over three steps: all of them are counted as
truncated, engine and trainer agree on log-probs out to the last token, memory does not grow.
Not covered: that such a run learns; all rewards are equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

LIMIT = 8192


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_three_steps_of_8192_tokens(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    model = make_checkpoint(tmp_path / "model", vocab_size=257, max_position_embeddings=LIMIT + 64)
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is 1+1?", "answer": "2"}\n' * 4)
    settings = {
        "name": "long",
        "runs": str(tmp_path / "runs"),
        "device": "cpu",
        "model": {"path": str(model)},
        "parallel": {"context": 2},
        "precision": {"dtype": "float32"},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 64},
        "training": {"steps": 3, "minibatches": 2, "tokens_per_microbatch": LIMIT + 64},
        "memory": {"recompute": "full"},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": LIMIT,
            "episode": "tests.support.episodes:until_the_limit",
        },
        "engine": {"max_sequences": 4, "kv_cache_gib": 0.5},
        "checkpoint": {"every": None},
    }
    config = tmp_path / "long.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [str(Path(sys.executable).with_name("rpg-megatron")), "train", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][-3:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["response/truncated_frac"] == 1
        assert row["response/length_p50"] == row["response/length_max"] == LIMIT
        assert row["mismatch/logp_max"] <= 1e-3
        assert row["mismatch/tokens"] == 4 * LIMIT
    peaks = [row["memory/peak_bytes"] for row in rows]
    assert peaks[2] <= 1.02 * peaks[1], peaks

"""Settings of a step's batch besides the loss: a KL in the reward, several passes over the batch.

Proved with real Megatron on two data-parallel ranks in fp32: with ``reward.kl`` the advantages on every rank
are those of rewards minus the KL of the response's sampled tokens, in its group; two epochs are the same
updates, bit for bit, as a batch whose mini-batches come twice, with the old policy from before the first. Not
covered: the gradient of a KL in the reward (tests/unit/test_baselines.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.layouts import make_case, write_rewarded_batch
from tests.support.ranks import run_ranks


def test_kl_in_the_reward_and_several_passes(tmp_path: Path) -> None:
    batch = write_rewarded_batch(tmp_path, 3)
    case = make_case(
        tmp_path / "model",
        {"data": 2},
        0,
        {
            "objective": {"beta": 0.0},
            "anchor": {"type": "fixed"},
            "reward": {"kl": {"coefficient": 0.5}},
            "training": {
                "minibatches": 2,
                "ppo_epochs": 2,
                "tokens_per_microbatch": 100,
                "logprob_chunk": 17,
            },
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0, "distributed": False},
        },
    )
    (tmp_path / "case.json").write_text(json.dumps(case))
    result = run_ranks("tests.distributed.training_knobs_worker", 2, tmp_path)

    by_sample = {(group, sample): values for part in result["ranks"] for group, sample, *values in part}
    assert len(by_sample) == len(batch)
    kl = np.array([by_sample[t.group, t.sample][0] for t in batch])
    assert np.abs(kl).min() > 1e-6
    rewards = np.array([t.reward for t in batch]) - 0.5 * kl
    expected = (rewards.reshape(4, 3) - rewards.reshape(4, 3).mean(1, keepdims=True)).ravel()
    advantages = [by_sample[t.group, t.sample][1] for t in batch]
    assert advantages == pytest.approx(expected, abs=1e-6)
    row = result["row"]
    assert row["kl/response"] == pytest.approx(kl.mean(), rel=1e-9)
    assert row["reward/kl"] == pytest.approx(-0.5 * kl.mean(), rel=1e-9)

    assert result["calls"] == [[i, 4] for i in range(4)]
    assert result["epochs"] == result["twice"] != result["once"]

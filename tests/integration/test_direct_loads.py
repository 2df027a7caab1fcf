"""gpt-oss, whose loader copies experts, biases and sinks by itself, gets new weights in a real vLLM engine.

Why: vLLM's own reload sees only what goes through a ``weight_loader``. By it these tensors kept their old
values without an error, and log-probs were off by nats. The engine starts with random weights; then the
plug-in loads two versions, and log-probs are compared with transformers. What would keep old values is
refused by name, and nothing is changed. The other kinds of loaders are in test_bridge_vllm.
Not covered: publisher and transports, which take matrices and vectors only (its experts have 3 dimensions).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.bridge_rig import hf_logprobs, make_model
from tests.support.bridge_trainers import state_dict
from tests.support.ranks import run_alone

TOLERANCE = 1e-4


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_weights_that_a_loader_copies_itself(tmp_path: Path, workers: int) -> None:
    make_model("gpt-oss", tmp_path / "model")
    *loaded, (refusals, after) = run_alone("tests.integration.direct_load_worker", tmp_path, str(workers))
    for seed, (reasons, logprobs) in enumerate(loaded, 1):
        expected = hf_logprobs(tmp_path / "model", state_dict(tmp_path / "model", seed))
        assert (torch.tensor(logprobs) - expected).abs().max() < TOLERANCE, seed
        assert len(reasons) == workers
        assert all("copy of an intermediate tensor into model.layers" in reason for reason in reasons)
    says = "the engine's GptOssForCausalLM would keep old values in model.layers.1.attn.sinks (0 of "
    assert all(refusal.startswith(says) for refusal in refusals), refusals
    assert after == loaded[-1][1]

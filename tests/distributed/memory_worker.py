"""The one rank of test_long_context's memory test: peaks of the log-prob head, ours and plain torch's."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.policies import start, trajectory_of
from benchmarks.shared_prompts import CHUNK, build_policy, make_checkpoint, run_policy
from rpg_megatron.policy.policy import Policy
from tests.support.allocations import AllocationWatch

TOKENS, VOCABULARY = 8192, 151_936


def plain_peak(tokens: int, *, backward: bool) -> int:
    """Peak bytes of log_softmax and entropy on full logits, beyond weight and hidden states."""
    hidden = torch.randn(tokens, 256, requires_grad=backward)
    weight = torch.randn(VOCABULARY, 256, requires_grad=backward)
    targets = torch.randint(0, VOCABULARY, (tokens, 1))
    with AllocationWatch() as watch:
        log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
        rows = log_p.gather(1, targets)[:, 0] - (log_p.exp() * log_p).sum(-1)
        if backward:
            rows.sum().backward()
    return watch.peak - (4 * weight.numel() if backward else 0)


def head_peaks(policy: Policy) -> dict[str, Any]:
    """Peak bytes of our log-prob pass and update, without the gradient of the output weight, and the elements
    of their largest tensor.
    """
    rng = np.random.default_rng(0)
    cuts = [0, 1, 9, TOKENS // 16, TOKENS // 3, TOKENS]
    sequences = [rng.integers(1, VOCABULARY, b - a + 1).astype(np.int32) for a, b in pairwise(cuts)]
    packs = [policy.pack([trajectory_of(s, 1, i) for i, s in enumerate(sequences)])]
    assert packs[0].size == TOKENS
    with AllocationWatch() as scoring:
        policy.logprobs(packs)
    with AllocationWatch() as update:
        run_policy(policy, packs)
    largest = max(torch.Size(w.largest).numel() for w in (scoring, update))
    return {"scoring": scoring.peak, "update": update.peak - 4 * 256 * VOCABULARY, "largest": largest}


def main() -> None:
    folder = Path(sys.argv[1])
    device, mesh = start("cpu")
    model = make_checkpoint(folder / "model", VOCABULARY)
    result = head_peaks(build_policy(model, mesh, device, TOKENS))
    result |= {"tokens": TOKENS, "vocab": VOCABULARY, "chunk": CHUNK}
    for name, backward in (("scoring", False), ("update", True)):
        result[f"plain {name}"] = [plain_peak(n, backward=backward) for n in (1024, 2048)]
    (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

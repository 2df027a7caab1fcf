"""The process of test_sampling_kernels: vLLM's kernels under Triton's interpreter, on tensors of the CPU.

``python kernels_worker.py FOLDER``, with ``TRITON_INTERPRET=1``. Writes their results beside torch's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

VOCABULARY = 9000  # more than one block of each kernel
FEW, DRAWS = 12, 1000


def sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, t: float) -> torch.Tensor:
    """One token for each row, of the request with that row's seed."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    temperatures = torch.full((len(logits),), t)
    return gumbel_sample(
        logits, rows, temperatures, seeds, positions, apply_temperature=False, is_drafting=False
    )


def main() -> None:
    torch.manual_seed(0)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.3])
    requests = torch.tensor([3, 1, 0, 2, 1], dtype=torch.int32)  # of each row
    logits = torch.randn(5, VOCABULARY) * 4
    scaled = logits.clone()
    apply_temperature(scaled, requests, temperatures)
    expected = logits / torch.where(temperatures == 0, 1, temperatures)[requests.long()][:, None]

    tokens = torch.tensor([0, 17, 8191, 8192, VOCABULARY - 1])
    scores = compute_topk_scores(scaled, 0, tokens)
    exact = torch.log_softmax(scaled.double(), -1).gather(1, tokens[:, None])
    ranks = (scaled >= scaled.gather(1, tokens[:, None])).sum(1)

    # One request's draws, alone and in another row among others.
    seeds, positions = torch.tensor([11, -5, 2**62]), torch.tensor([4, 4, 900])
    rows = torch.randn(3, VOCABULARY)
    together = sample(rows, seeds, positions, 1.0)
    order = torch.tensor([2, 0, 1])
    turned = sample(rows[order], seeds[order], positions[order], 1.0)
    alone = torch.cat(
        [sample(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1], 1.0) for i in range(3)]
    )
    greedy = sample(rows, seeds, positions, 0.0)

    few = torch.randn(FEW)
    drawn = sample(few.expand(DRAWS, FEW), torch.full((DRAWS,), 7), torch.arange(DRAWS), 1.0)
    seeded = sample(few.expand(DRAWS, FEW), torch.arange(DRAWS), torch.full((DRAWS,), 7), 1.0)
    result = {
        "temperature": (scaled - expected).abs().max().item(),
        "logprobs": (scores.logprobs - exact).abs().max().item(),
        "ranks": torch.equal(scores.selected_token_ranks, ranks),
        "alone": torch.equal(together, alone),
        "turned": torch.equal(together[order], turned),
        "greedy": torch.equal(greedy, rows.argmax(-1)),
        "chances": torch.softmax(few, -1).tolist(),
        "by position": torch.bincount(drawn, minlength=FEW).tolist(),
        "by seed": torch.bincount(seeded, minlength=FEW).tolist(),
    }
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

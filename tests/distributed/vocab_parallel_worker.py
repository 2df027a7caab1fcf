"""One rank of test_vocab_parallel_logprobs: the chunked head with its vocabulary cut over all ranks."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rpg_megatron.policy.logprobs import Head, token_logprobs
from tests.support.allocations import AllocationWatch
from tests.support.logprob_reference import measure_errors

CASES = [(250, 2), (251, 1), (251, 9), (253, 19), (33, 95)]
"""(vocabulary, padding after it); in the last case, one of two ranks has only padding."""


def largest_tensor(tokens: int, vocab: int, chunk: int) -> int:
    """Elements of the largest tensor alive, forward and backward."""
    hidden, weight = torch.randn(tokens, 8).requires_grad_(), torch.randn(vocab // 2, 8).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    with AllocationWatch() as watch:
        logp, entropy = token_logprobs(
            hidden, weight, targets, Head(0.7, chunk, vocab), group=dist.group.WORLD
        )
        (logp + entropy).sum().backward()
    return torch.Size(watch.largest).numel()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    problems = []
    for (vocab, padding), chunk, temperature in itertools.product(CASES, (1, 8, 37, 64), (0.6, 0.85, 1.0)):
        problems += measure_errors(
            vocab=vocab,
            tokens=37,
            width=48,
            chunk=chunk,
            temperature=temperature,
            padding=padding,
            adapter=7 if chunk == 8 else 0,
            group=dist.group.WORLD,
        )
    result = {"problems": problems, "largest": largest_tensor(tokens=512, vocab=2000, chunk=50)}
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

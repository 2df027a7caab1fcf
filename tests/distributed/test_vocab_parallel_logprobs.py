"""The chunked log-prob head with its vocabulary cut over two ranks gives the numbers of one rank in float64.

Vocabularies that two ranks do and do not divide, with padding on one rank, on both, and filling one of them;
any chunk; temperatures. No tensor of [tokens, vocab / 2] is ever alive. Not covered: the head inside a model
(test_layouts).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist

from rpg_megatron.policy.logprobs import Head, token_logprobs
from tests.support.allocations import AllocationWatch
from tests.support.logprob_reference import measure_errors
from tests.support.ranks import ranks

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


@ranks(2)
def measure(folder: Path) -> tuple[list[str], int]:
    """What differs from float64, and the largest tensor."""
    problems: list[str] = []
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
    return problems, largest_tensor(tokens=512, vocab=2000, chunk=50)


def test_equals_float64_cut_over_two_ranks(tmp_path: Path) -> None:
    problems, largest = measure(tmp_path)
    assert not problems, "\n".join(problems)
    assert largest == 50 * 1000

"""The chunked log-prob head with its vocabulary cut over two ranks gives the numbers of one rank in float64.

Vocabularies that two ranks do and do not divide, with padding on one rank, on both, and filling one of them;
any chunk; temperatures. No tensor of [tokens, vocab / 2] is ever alive. Not covered: the head inside a model
(test_layouts).
"""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_equals_float64_cut_over_two_ranks(tmp_path: Path) -> None:
    result = run_ranks("tests.distributed.vocab_parallel_worker", 2, tmp_path)
    assert not result["problems"], "\n".join(result["problems"])
    assert result["largest"] == 50 * 1000

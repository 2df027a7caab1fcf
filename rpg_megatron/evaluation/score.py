"""From graded responses to the numbers of an evaluation. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rpg_megatron.data.results import EvalResult
from rpg_megatron.rewards import spelling


def score_results(name: str, results: Sequence[EvalResult]) -> dict[str, float]:
    """Metrics of one evaluation, ``eval/<name>/...``, for k responses to each problem:

    - ``avg@k``: share of right responses;
    - ``pass@j`` for j = 1, 2, 4, ... and k: unbiased estimate of the chance that one of j responses is right;
    - ``maj@k``: share of problems whose most frequent answer is right;
    - ``truncated_frac`` and ``length_mean`` over all responses.

    Raises ValueError if there is no result, or if problems have different numbers of responses.
    """
    counts = {len(r.correct) for r in results}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"an evaluation needs the same number of responses to each problem, not {sorted(counts)}"
        )
    k = counts.pop()
    right = [sum(r.correct) for r in results]
    total = k * len(results)
    metrics = {f"avg@{k}": sum(right) / total}
    for j in _draw_sizes(k):
        metrics[f"pass@{j}"] = math.fsum(pass_at(k, c, j) for c in right) / len(results)
    metrics[f"maj@{k}"] = sum(majority_correct(r) for r in results) / len(results)
    metrics["truncated_frac"] = sum(finish == "length" for r in results for finish in r.finishes) / total
    metrics["length_mean"] = sum(length for r in results for length in r.lengths) / total
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def pass_at(n: int, right: int, k: int) -> float:
    """Chance that k responses drawn without replacement from n, of which ``right`` are right, hold a right
    one.

    1 - C(n - right, k) / C(n, k): the unbiased estimate of pass@k.
    """
    if not 0 < k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} of {n} responses with {right} right is not defined")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_correct(result: EvalResult) -> bool:
    """Whether the most frequent answer is right. Answers count as the same if the grader says so; responses
    without an answer have no vote; of answers with equally many votes the one that came first wins.
    """
    votes: Counter[str] = Counter()
    verdict: dict[str, bool] = {}
    for answer, correct in zip(result.extracted, result.correct, strict=True):
        if answer is None:
            continue
        key = spelling.canonical(answer)
        votes[key] += 1
        verdict.setdefault(key, correct)
    if not votes:
        return False
    return verdict[votes.most_common(1)[0][0]]  # most_common keeps the order of arrival among equals


def write_results(path: Path, results: Sequence[EvalResult]) -> None:
    """Write one JSON object a line for each problem, as a whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
    partial.replace(path)


def _draw_sizes(k: int) -> list[int]:
    powers = [2**i for i in range(k.bit_length()) if 2**i < k]
    return [*powers, k]

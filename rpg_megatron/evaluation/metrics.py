"""Evaluation metrics of graded responses: avg@k, pass@k, maj@k, lengths, bootstrap intervals."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rpg_megatron.config.evaluation import pass_sizes
from rpg_megatron.config.files import atomic_write
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards import normalize

Floats = npt.NDArray[np.float64]
_CHUNK = 1 << 20
"""Values resampled at a time, to bound memory for any number of problems."""


def score_results(name: str, results: Sequence[EvalResult]) -> dict[str, float]:
    """Metrics of one evaluation, ``eval/<name>/...``, for k responses to each problem:

    - ``avg@k``: fraction of correct responses;
    - ``pass@j`` for j = 1, 2, 4, ... and k: unbiased estimate of the probability that at least one of j
      responses is correct;
    - ``maj@k``: fraction of problems whose most frequent answer is correct;
    - over all responses ``truncated_frac``, and ``length_mean``, ``length_p50`` and ``length_p99`` in tokens.

    Raises ValueError if there is no result, or if problems have different numbers of responses.
    """
    values = per_problem(results)
    metrics = {key: float(column.mean()) for key, column in values.items()} | describe_lengths(results)
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def score_sets(results: Sequence[EvalResult]) -> dict[str, float]:
    """``score_results`` of each held-out set in the results."""
    sets: dict[str, list[EvalResult]] = {}
    for result in results:
        sets.setdefault(result.set, []).append(result)
    return {key: value for name, rows in sets.items() for key, value in score_results(name, rows).items()}


def per_problem(results: Sequence[EvalResult]) -> dict[str, Floats]:
    """``avg@k``, ``pass@j`` and ``maj@k`` of each problem, float64 [problems]; the metrics are their means.

    Raises ValueError as ``score_results`` does.
    """
    counts = {len(r.correct) for r in results}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"an evaluation needs the same number of responses to each problem, not {sorted(counts)}"
        )
    k = counts.pop()
    correct = [sum(r.correct) for r in results]
    columns = {f"avg@{k}": [c / k for c in correct]}
    columns |= {f"pass@{j}": [pass_at(k, c, j) for c in correct] for j in pass_sizes(k)}
    columns[f"maj@{k}"] = [float(majority_correct(r)) for r in results]
    return {key: np.array(column, np.float64) for key, column in columns.items()}


def describe_lengths(results: Sequence[EvalResult]) -> dict[str, float]:
    """``truncated_frac``, and ``length_mean``, ``length_p50`` and ``length_p99`` in tokens, over all
    responses.
    """
    lengths = np.array([length for r in results for length in r.lengths], np.float64)
    truncated = [finish == "length" for r in results for finish in r.finishes]
    return {
        "truncated_frac": float(np.mean(truncated)),
        "length_mean": float(lengths.mean()),
        "length_p50": float(np.quantile(lengths, 0.5)),
        "length_p99": float(np.quantile(lengths, 0.99)),
    }


def bootstrap_intervals(
    values: Mapping[str, Floats], *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap interval of the mean of each column, float64 [problems].

    Problems are resampled, not responses, because the responses to a problem are not independent; each
    resample is used for all columns. If all problems have the same value, the interval has width 0.
    """
    table = np.stack(list(values.values()), axis=1)  # [problems, columns]
    problems = len(table)
    rng = np.random.Generator(np.random.PCG64(seed))
    chunk = max(1, _CHUNK // table.size)
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]
    means = [table[rng.integers(problems, size=(size, problems))].mean(axis=1) for size in sizes]
    edges = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {key: (float(low), float(high)) for key, low, high in zip(values, *edges, strict=True)}


def describe_set(results: Sequence[EvalResult], seed: int) -> dict[str, Any]:
    """Report of one set, for JSON: ``problems``, ``samples``, and

    - ``metrics``: each metric of ``per_problem`` with its ``value`` and 95% interval ``low`` to ``high``;
    - ``length``: ``mean``, ``p50``, ``p99`` and ``max``, in tokens, over all responses;
    - ``truncated``: fraction of truncated responses (``frac``), number of problems with at least one, and
      fraction of correct ones among them (null if there is none);
    - ``unanswered_frac``: fraction of responses without an answer.

    seed: of the bootstrap. Raises ValueError as ``score_results`` does.
    """
    values = per_problem(results)
    intervals = bootstrap_intervals(values, seed=seed)
    lengths = describe_lengths(results)
    truncated = [
        c for r in results for c, finish in zip(r.correct, r.finishes, strict=True) if finish == "length"
    ]
    answers = [answer for r in results for answer in r.extracted]
    return {
        "problems": len(results),
        "samples": len(results[0].correct),
        "metrics": {
            key: {"value": float(column.mean()), "low": intervals[key][0], "high": intervals[key][1]}
            for key, column in values.items()
        },
        "length": {name: lengths[f"length_{name}"] for name in ("mean", "p50", "p99")}
        | {"max": max(length for r in results for length in r.lengths)},
        "truncated": {
            "frac": lengths["truncated_frac"],
            "problems": sum("length" in r.finishes for r in results),
            "correct_frac": sum(truncated) / len(truncated) if truncated else None,
        },
        "unanswered_frac": sum(answer is None for answer in answers) / len(answers),
    }


def pass_at(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k from n responses: 1 - C(n - correct, k) / C(n, k).

    That is the probability that k responses, sampled without replacement, include a correct one. Raises
    ValueError unless 0 < k <= n and 0 <= correct <= n.
    """
    if not 0 < k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {n} responses with {correct} correct is not defined")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_correct(result: EvalResult) -> bool:
    """Whether the most frequent answer is correct.

    Equal answers (``result.classes``) count as one, which is correct if the first of them is; responses
    without an answer have no vote; ties go to the answer that came first. Without classes, those with the
    same canonical text are equal.
    """
    texts = (None if answer is None else normalize.canonical(answer) for answer in result.extracted)
    votes: Counter[int | str] = Counter()
    verdict: dict[int | str, bool] = {}
    for key, correct in zip(result.classes or texts, result.correct, strict=True):
        if key is not None:
            votes[key] += 1
            verdict.setdefault(key, correct)
    if not votes:
        return False
    return verdict[votes.most_common(1)[0][0]]  # most_common keeps insertion order among ties


def write_results(path: Path, results: Sequence[EvalResult]) -> None:
    """Write one JSON object per problem and line, atomically. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        for result in results:
            line = json.dumps(asdict(result), ensure_ascii=False) + "\n"
            file.write(line.encode("utf-8", "surrogatepass"))

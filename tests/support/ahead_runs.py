"""Checks what does not depend on timing in a run that samples ahead (docs/async.md).

Responses depend on timing, and what was in flight is sampled again. The groups of each step do not, nor the
maximum age of a token. The result is a list of problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.config import load_settings
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_complete, rollouts_file
from rpg_megatron.data.trajectory import Trajectory
from tests.support.same_runs import read_rows

LARGEST, MEAN, RATIO = 1e-3, 1e-4, 8.0
"""The guard's bounds in float32."""


def compare_ahead(run: Path, reference: Path) -> list[str]:
    """The steps so far against those of an undisturbed run."""
    rows, reference_rows = read_rows(run), read_rows(reference)
    steps = [row["step"] for row in rows]
    if steps != list(range(len(rows))) or len(rows) > len(reference_rows):
        return [f"rows of steps {steps}; wanted 0, 1, ... up to {len(reference_rows) - 1}"]
    rollout = load_settings(reference / "config.yaml").rollout
    size = rollout.prompts_per_step, rollout.samples_per_prompt
    problems = []
    for row, reference_row in zip(rows[1:], reference_rows[1:], strict=False):
        step = row["step"]
        problems += [f"metrics of step {step}: {wrong}" for wrong in _wrong_metrics(row, reference_row)]
        files = [rollouts_file(folder, step) for folder in (run, reference)]
        if rollouts_complete(files[0]):  # else find_missing_rollouts reports it
            batch, undisturbed = (read_rollouts(file) for file in files)
            wrong = [
                *_wrong_groups(batch, undisturbed, step, *size),
                *_wrong_ages(batch, step, rollout.ahead),
            ]
            problems += [f"rollouts of step {step}: {text}" for text in wrong]
    return problems


def count_mixed(run: Path) -> int:
    """Responses so far that a weight update interrupted: more than one version sampled them."""
    files = [rollouts_file(run, row["step"]) for row in read_rows(run)[1:]]
    batches = [read_rollouts(file) for file in files if rollouts_complete(file)]
    return sum(len(set(t.versions.tolist())) > 1 for batch in batches for t in batch)


def _wrong_groups(
    batch: Sequence[Trajectory], undisturbed: Sequence[Trajectory], step: int, groups: int, samples: int
) -> Iterator[str]:
    """Step n has the tickets (n - 1) x groups to n x groups - 1, with the prompts of the undisturbed run."""
    tickets = range((step - 1) * groups, step * groups)
    expected = [(ticket, sample) for ticket in tickets for sample in range(samples)]
    actual = [(t.ticket, t.sample) for t in batch]
    lost, doubled = Counter(expected) - Counter(actual), Counter(actual) - Counter(expected)
    if lost or doubled:
        yield f"(ticket, sample) {sorted(lost)[:4]} lost, {sorted(doubled)[:4]} too many"
    elif actual != expected:
        yield "tickets or samples in another order"
    elif [t.prompt.tolist() for t in batch] != [t.prompt.tolist() for t in undisturbed]:
        yield "other prompts"


def _wrong_ages(batch: Sequence[Trajectory], step: int, ahead: int) -> Iterator[str]:
    """Each token is 0 to ``ahead`` updates older than the weights that the step updates."""
    for t in batch:
        lags = {step - 1 - version for version in t.versions.tolist()}
        if len(t.versions) != len(t.response) or not lags <= set(range(ahead + 1)):
            yield f"ticket {t.ticket}, sample {t.sample}: tokens of age {sorted(lags)}, not 0 to {ahead}"


def _wrong_metrics(row: dict[str, Any], reference: dict[str, Any]) -> Iterator[str]:
    for key in ("lr", "sync/version"):
        if row.get(key) != reference.get(key):
            yield f"{key} is {row.get(key)}, not {reference.get(key)}"
    if not row.get("async/probe_tokens", 0) > 0:
        yield "no probe was compared"
    of_engine = row.get("mismatch/logp_engine_mean", 0.0)
    means = row.get("mismatch/logp_mean", float("inf")), of_engine
    if not (row.get("mismatch/logp_max", float("inf")) <= LARGEST and all(m <= MEAN for m in means)):
        yield f"mismatch/logp_max {row.get('mismatch/logp_max')}, means {means}: beyond {LARGEST}, {MEAN}"
    if of_engine > MEAN / 50 and row.get("mismatch/logp_engine_ratio", 0.0) > RATIO:
        yield f"mismatch/logp_engine_ratio is {row['mismatch/logp_engine_ratio']}"

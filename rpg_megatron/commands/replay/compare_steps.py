"""The ranks' part of ``rpg-megatron replay``: repeats the training of a step from its saved rollouts.

Log-probs, advantages, loss, gradient norm and the other metrics of the step are compared with those that the
run saved. The steps between the checkpoint and the requested step are also trained and compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.rollout_files import iter_rollouts, rollouts_file
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.collectives import gather_on_first
from rpg_megatron.system.events import EventSender
from rpg_megatron.system.metrics_file import METRICS, read_metrics
from rpg_megatron.training.trainer import Trainer

_COMPARED = ("policy/", "kl/", "ratio/", "correction/", "off_policy/", "lr")


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay."""

    run: str
    """Folder of the run."""
    step: int
    checkpoint: str | None
    """Where to start; None: from the initial model of the run."""
    tolerance: float
    """Maximum difference of a match: absolute, and relative for numbers above 1."""


def replay(trainer: Trainer, request: ReplayRequest, events: EventSender) -> dict[str, Any]:
    """Replay what is asked for; rank 0 returns the report, for JSON. Collective."""
    run, first = Path(request.run), trainer.mesh.rank == 0
    rows = {int(row["step"]): row for row in read_metrics(run / METRICS)} if first else {}
    done = int(trainer.load(Path(request.checkpoint), trusted=True)["step"]) if request.checkpoint else 0
    steps = []
    for step in range(done + 1, request.step + 1):
        if first:
            events.phase(f"replaying step {step} of {request.step}", 0, 1)
        file = rollouts_file(run, step)
        source = SavedRollouts(file) if trainer.mesh.leads else None
        batch = trainer.prepare_batch(index_of(iter_rollouts(file)) if first else None, source)
        trainer.scorer.compute_log_probs(batch)
        trainer.update(step, batch, lambda done, total: None)
        gaps_of_rank = measure_gaps(source.saved, batch.mine) if source else None
        gaps = gather_on_first(gaps_of_rank, Gaps | None)
        if first:
            largest = join_gaps([g for g in gaps if g is not None])
            row = rows.get(step, {})
            steps.append({"step": step} | compare(largest, row, batch.metrics, request.tolerance))
    return {"request": asdict(request), **steps[-1], "steps": steps} if first else {}


class SavedRollouts:
    """``TrajectorySource`` that reads the saved rollouts of a step, without what the trainer added."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.saved: list[Trajectory] = []
        """The trajectories of the last ``fetch``, with everything that the run saved."""

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], row: Sequence[int]) -> list[Trajectory]:
        """See ``TrajectorySource``; tickets are those of ``index_of``.

        Raises UserError as ``iter_rollouts`` does.
        """
        places = {numbers: place for place, numbers in enumerate(zip(ticket, row, strict=True))}
        by_place, sizes = {}, Counter[int]()
        for t in iter_rollouts(self._file):
            if (place := places.get((t.group, sizes[t.group]))) is not None:
                by_place[place] = t
            sizes[t.group] += 1
        self.saved = [by_place[place] for place in range(len(places))]
        return [_unscored(t) for t in self.saved]


@dataclass(frozen=True)
class Gaps:
    """Maximum differences between a step of the run and its replay."""

    tokens: int
    """Number of response tokens compared: those that the policy sampled."""
    old: float
    anchor: float
    advantage: float


def measure_gaps(saved: Sequence[Trajectory], replayed: Sequence[Trajectory]) -> Gaps:
    """Compare trajectories; both sequences have the same order."""

    def largest(name: str) -> float:
        pairs = [(_compared(a, name), _compared(b, name)) for a, b in zip(saved, replayed, strict=True)]
        return max((_gap(a, b) for a, b in pairs), default=0.0)

    tokens = sum(t.sampled for t in saved)
    return Gaps(tokens, largest("old"), largest("anchor"), largest("advantage"))


def _compared(t: Trajectory, name: str) -> Any:
    """A number, or those of the tokens that the policy sampled; without any, if there are none."""
    values = getattr(t, name)
    return values[t.mask] if np.size(values) == len(t.mask) and name != "advantage" else values


def join_gaps(gaps: Sequence[Gaps]) -> Gaps:
    """Combine the gaps of all leaders."""
    old, anchor, advantage = (max(getattr(g, name) for g in gaps) for name in ("old", "anchor", "advantage"))
    return Gaps(sum(g.tokens for g in gaps), old, anchor, advantage)


def compare(gaps: Gaps, row: dict[str, Any], metrics: dict[str, float], tolerance: float) -> dict[str, Any]:
    """Report of one step of the run and its replay, for JSON.

    match: all differences are within the tolerance; exact: the results are bitwise equal.
    """
    differences = {
        "old log-probs": gaps.old,
        "anchor log-probs": gaps.anchor,
        "advantages": gaps.advantage,
    }
    recorded = {key: value for key, value in row.items() if key.startswith(_COMPARED)}
    replayed = {key: value for key, value in metrics.items() if key.startswith(_COMPARED)}
    pairs = {key: (recorded.get(key), replayed.get(key)) for key in sorted(recorded | replayed)}
    different = {key: (a, b) for key, (a, b) in pairs.items() if a != b}
    beyond = any(
        a is None or b is None or not abs(a - b) <= tolerance * max(1.0, abs(a))
        for a, b in different.values()
    )
    return {
        "match": bool(recorded) and not beyond and all(gap <= tolerance for gap in differences.values()),
        "exact": bool(recorded) and not different and not any(differences.values()),
        "tokens": gaps.tokens,
        "max_difference": {name: _plain(gap) for name, gap in differences.items()},
        "metrics": {key: {"run": a, "replay": b} for key, (a, b) in pairs.items()},
        "differing": list(different),
    }


def _gap(a: Any, b: Any) -> float:
    """Maximum difference; infinite if a value is NaN or the lengths differ."""
    a, b = np.atleast_1d(np.asarray(a, np.float64)), np.atleast_1d(np.asarray(b, np.float64))
    if a.shape != b.shape:
        return math.inf
    return float(np.nan_to_num(np.abs(a - b), nan=math.inf).max(initial=0.0))


def _plain(gap: float) -> float | None:
    """The gap, or None for infinity, which JSON does not have."""
    return gap if math.isfinite(gap) else None


def _unscored(t: Trajectory) -> Trajectory:
    """The trajectory as received from the sampler."""
    nothing = np.zeros(0, np.float32)
    return replace(t, old=nothing, anchor=nothing, advantage=0.0)

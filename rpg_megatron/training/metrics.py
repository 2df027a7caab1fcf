"""Training metrics: engine/trainer log-prob mismatch, and the writer for metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from rpg_megatron.config import UserError
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.data.trajectory import Trajectory


def compare_logprobs(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """|old - behaviour| in nats over tokens sampled with weights ``version``: mean, 99th percentile, maximum.

    Trainer and engine have the same weights for those tokens, so a difference points at weights, positions,
    packing, masks or temperature. Tokens sampled with older weights are expected to differ: they are left
    out, and counted.
    """
    gaps = [np.abs(t.old - t.behaviour)[t.versions == version] for t in trajectories]
    gap = np.concatenate(gaps) if gaps else np.zeros(0, np.float32)
    stale = sum(int((t.versions != version).sum()) for t in trajectories)
    row = {"mismatch/tokens": float(gap.size), "mismatch/stale_tokens": float(stale)}
    if gap.size:
        row |= {
            "mismatch/logp_mean": float(gap.mean(dtype=np.float64)),
            "mismatch/logp_p99": float(np.quantile(gap, 0.99)),
            "mismatch/logp_max": float(gap.max()),
        }
    return row


def guard_mismatch(
    row: dict[str, float],
    trajectories: Sequence[Trajectory],
    settings: GuardSettings,
    dtype: str,
    *,
    version: int,
    step: int,
) -> str | None:
    """None if the mismatch is within bounds, otherwise a message that names the worst token.

    Raises UserError with that message if ``guards.mismatch`` is ``stop``.
    """
    if settings.mismatch == "off" or "mismatch/logp_max" not in row:
        return None
    largest, mean = settings.thresholds(dtype)
    # Written so that a NaN counts as out of bounds.
    if row["mismatch/logp_max"] <= largest and row["mismatch/logp_mean"] <= mean:
        return None
    # Stale tokens are left out; a NaN counts as infinite.
    gaps = [
        np.where(t.versions == version, np.nan_to_num(np.abs(t.old - t.behaviour), nan=np.inf), -1.0)
        for t in trajectories
    ]
    index = max(range(len(gaps)), key=lambda i: gaps[i].max())
    worst, position = trajectories[index], int(gaps[index].argmax())
    message = (
        f"step {step}: engine and trainer disagree on the log-probs of tokens that the same weights sampled: "
        f"max {row['mismatch/logp_max']:.2e} (bound {largest:.0e}), mean {row['mismatch/logp_mean']:.2e} "
        f"(bound {mean:.0e}) nats; worst at token {position} of {len(worst.response)} of prompt "
        f"{worst.prompt_id}, sample {worst.sample}: engine {worst.behaviour[position]:.5f}, trainer "
        f"{worst.old[position]:.5f}. Run rpg-megatron audit RUN to find where they diverge, or set "
        "guards.mismatch=warn to continue"
    )
    if settings.mismatch == "stop":
        raise UserError(message)
    return message


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and to TensorBoard files in the run's folder."""

    def __init__(self, run_dir: Path, done: int | None = None):
        """done: completed steps of a resumed run; TensorBoard then hides later ones."""
        self._file: IO[str] = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=None if done is None else done + 1
        )

    def write(self, row: dict[str, Any]) -> None:
        """Write one row; numbers go to TensorBoard as well, under the row's ``step``.

        Raises OSError if it cannot be written, UserError if the file has been removed.
        """
        if not os.fstat(self._file.fileno()).st_nlink:
            raise UserError(
                f"{self._file.name} has been removed during the run; start a new run, and keep its folder"
            )
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(key, value, row["step"])
        self._board.flush()

    def sync_to_disk(self) -> int:
        """Make the rows survive a power cut; returns the size of ``metrics.jsonl`` in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()

"""The writer for metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from torch.utils.tensorboard import SummaryWriter

from rpg_megatron.config import UserError


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

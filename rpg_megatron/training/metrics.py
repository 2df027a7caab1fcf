"""The writer for metrics.jsonl, TensorBoard and the trackers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from torch.utils.tensorboard import SummaryWriter

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import open_own
from rpg_megatron.config.trackers import BOARD_RESPONSES, TensorBoardSettings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.training.trackers.client import Trackers, sample_responses
from rpg_megatron.training.trackers.texts import ResponseTexts, to_markdown

_LONGEST = 2000
"""Maximum characters of a prompt or response in TensorBoard, whose files are kept for all steps."""
_TRACKER_SECONDS = 30.0
"""Time limit for trackers to send the remaining rows when a run ends, in seconds."""


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and to TensorBoard files, and passes them to trackers."""

    def __init__(
        self,
        run_dir: Path,
        done: int | None = None,
        *,
        board: bool = True,
        board_responses: int = 0,
        model: Path | None = None,
        trackers: Trackers | None = None,
    ):
        """done: completed steps of a resumed run; TensorBoard then hides later ones. board: whether to write
        TensorBoard files. board_responses: responses in them for each step, decoded by the tokenizer of the
        checkpoint ``model``.
        """
        self._file: IO[str] = open_own(run_dir / "metrics.jsonl", "a", encoding="utf-8")
        self._board: SummaryWriter | None = None
        if board:
            self._board = SummaryWriter(
                str(run_dir / "tensorboard"), purge_step=None if done is None else done + 1
            )
        self._trackers = trackers
        self._board_responses, self._model = board_responses if model is not None else 0, model
        self._texts: ResponseTexts | None = None
        self._responses: list[dict[str, Any]] = []
        """Responses that TensorBoard gets with the next row."""

    def add_responses(self, trajectories: Sequence[Trajectory]) -> None:
        """Pass some of these to TensorBoard and trackers with the next row."""
        self._responses = sample_responses(trajectories, self._board_responses)
        if self._trackers is not None:
            self._trackers.add_responses(trajectories)

    def write(self, row: dict[str, Any]) -> None:
        """Write one row; its numbers also go to TensorBoard and trackers, under the row's ``step``.

        Raises OSError if it cannot be written, UserError if the file has been removed.
        """
        if not os.fstat(self._file.fileno()).st_nlink:
            raise UserError(
                f"{self._file.name} was removed during the run; start a new run, and keep its folder"
            )
        if self._trackers is not None:
            row = row | self._trackers.metrics()
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._trackers is not None:
            self._trackers.put(row)
        if self._board is None:
            return
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(key, value, row["step"])
        if self._responses and self._model is not None:
            self._texts = self._texts or ResponseTexts(self._model, _LONGEST)
            shown = [self._texts.readable(response) for response in self._responses]
            self._board.add_text("responses", to_markdown(shown), row["step"])
            self._responses = []
        self._board.flush()

    def sync_to_disk(self) -> int:
        """Flush the rows to disk (fsync); returns the size of ``metrics.jsonl`` in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close_trackers(self) -> None:
        """Wait until trackers have sent the remaining rows, at most half a minute; they get no more rows."""
        if self._trackers is not None:
            self._trackers.close(_TRACKER_SECONDS)

    def close(self) -> None:
        """Flush and close all."""
        self.close_trackers()
        self._file.close()
        if self._board is not None:
            self._board.close()


def open_metrics(
    settings: Settings, run_dir: Path, done: int | None, warn: Callable[[str], None]
) -> MetricsWriter:
    """The writer for the configured trackers. warn: called with problems of trackers, from their threads."""
    boards = [tracker for tracker in settings.trackers if isinstance(tracker, TensorBoardSettings)]
    trackers = None if len(boards) == len(settings.trackers) else Trackers(settings, run_dir, warn)
    return MetricsWriter(
        run_dir,
        done,
        board=bool(boards),
        board_responses=BOARD_RESPONSES * len(boards),
        model=settings.model.path,
        trackers=trackers,
    )

"""Saves the rollouts of each step: every leader writes its own trajectories, in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rpg_megatron.data.rollout_files import part_file, remove_rollouts, rollouts_file, write_rollouts
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import Mesh
from rpg_megatron.system.collectives import any_rank, gather_objects


def keeps_routes(step: int, steps: int | tuple[int, ...]) -> bool:
    """Whether the routes of a step are saved with its rollouts. steps: ``rollout.journal_routes``."""
    if isinstance(steps, tuple):
        return step in steps
    return steps > 0 and step % steps == 0


class RolloutSaver:
    """This rank's part of the rollouts of a run, one step at a time."""

    def __init__(self, run_dir: Path, mesh: Mesh) -> None:
        self._run_dir, self._mesh = run_dir, mesh
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._writing: Future[None] | None = None
        self._file: Path | None = None  # being written; set on every rank

    def prepare(self, step: int) -> None:
        """Remove the step's files of an earlier attempt, which may have had another layout. Raises OSError.

        Call it on rank 0 before any leader writes.
        """
        remove_rollouts(rollouts_file(self._run_dir, step))

    def start(self, step: int, trajectories: Sequence[Trajectory], *, routes: bool) -> None:
        """Start writing on leaders. Call it on all ranks, after ``finish`` of the previous step.

        The trajectories must not change until ``finish``. routes: also save their routes, if any.
        """
        mesh = self._mesh
        self._file = part_file(rollouts_file(self._run_dir, step), mesh.data_rank, mesh.data)
        if mesh.leads:
            self._writing = self._thread.submit(write_rollouts, self._file, trajectories, routes=routes)

    def finish(self) -> list[str]:
        """Wait until all leaders have written the step; returns all errors, on every rank. Collective."""
        if self._file is None:
            return []
        failure = self.finish_own()
        return [f for f in gather_objects(failure, str) if f] if any_rank(bool(failure)) else []

    def finish_own(self) -> str:
        """Wait until this rank has written its part; returns the error or "". Not collective."""
        file, self._file = self._file, None
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as e:
            return str(e) if str(file) in str(e) else f"{file}: {e}"
        return ""

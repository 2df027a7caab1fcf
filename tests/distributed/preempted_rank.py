"""One rank of test_preemption: the product's, but trajectories come from the file of its stand-in sampler.

``python -m tests.distributed.preempted_rank RUN_DIR WORK_DIR BRIDGE_DIR [CHECKPOINT]``
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.training.rank import RankProcess, run_rank
from tests.support.batches import ListSource

BATCH = "batch.pkl"
"""File in the work folder: the step's trajectories."""


class FileSource:
    def __init__(self, file: Path) -> None:
        self._file = file

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], row: Sequence[int]) -> list[Trajectory]:
        return ListSource(pickle.loads(self._file.read_bytes())).fetch(worker, ticket, row)

    def close(self) -> None:
        pass


def _train(rank: RankProcess) -> bool:
    from rpg_megatron.training import run
    from rpg_megatron.training.loop import train

    source = FileSource(rank.work / BATCH) if rank.mesh.leads else None
    run.open_source = lambda *_: source  # type: ignore[assignment,return-value]
    return train(rank.start_run(run.RankRun, Path(sys.argv[4]) if len(sys.argv) > 4 else None))


if __name__ == "__main__":
    run_rank(_train)

"""One rank of test_extend: steps with code of the user from the working directory, in each layout."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.training.metrics import MetricsWriter
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import prepare


def train(case: dict, folder: Path, device: torch.device) -> None:
    """All steps on the fixed batch; rank 0 writes their metrics to FOLDER/NAME."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    trainer = Trainer(settings, mesh, device)
    writer = MetricsWriter(folder / case["name"]) if mesh.rank == 0 else None
    for step in range(1, settings.training.steps + 1):
        batch = prepare(trainer, pickle.loads((folder / "batch.pkl").read_bytes()))
        trainer.scorer.compute_log_probs(batch)
        trainer.update(step, batch, lambda done, total: None)
        if writer is not None:
            writer.write({"step": step, **batch.metrics})
    if writer is not None:
        writer.close()
    mpu.destroy_model_parallel()


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    device = start_device("cpu")
    start_process_group(device)
    for case in json.loads((folder / "cases.json").read_text()):
        train(case, folder, device)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text("{}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_parking: updates with and without the state's absence in between."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rpg_megatron.policy.runtime import start_device, start_process_group  # isort: skip

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.bridge.collective import gather_objects
from rpg_megatron.config import Settings
from rpg_megatron.policy.model import start_mesh
from tests.distributed.skip_worker import differing, start, state, train


def measure(case: dict, folder: Path, device: torch.device) -> dict:
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)
    one, other = start(case, mesh, device), start(case, mesh, device)
    parking = one.policy.parking
    empty = parking.leave()  # before the first update there are main weights and no moments
    parking.come_back()
    for trainer in (one, other):
        train(trainer, 1, folder)
    before = state(one)
    weights = sum(p.nbytes for _, p in one.policy.named_parameters())
    gradients = [p.main_grad for _, p in one.policy.named_parameters()]
    held = parking.leave()
    again = parking.leave()
    left = sum(s.nbytes() for s in parking._storages())
    released = all(g.untyped_storage().nbytes() == 0 for g in gradients)
    scores = [t.policy.logprobs([t.policy.pack([])])[0] for t in (one, other)]
    parking.come_back()
    parking.come_back()
    returned = differing(before, state(one))
    places = {id(b) for buffers in parking._buffers.values() for b in buffers}
    parking.leave()
    parking.come_back()
    kept = places == {id(b) for buffers in parking._buffers.values() for b in buffers}
    here, away = [], []
    for _ in range(5 if device.type == "cuda" else 0):
        here.append(torch.cuda.memory_allocated())
        parking.leave()
        away.append(torch.cuda.memory_allocated())
        parking.come_back()
    for trainer in (one, other):
        train(trainer, 2, folder)
    everyone = gather_objects(
        {
            "bytes": [empty, held, again, left, weights],
            "released": released,
            "scores": bool(torch.equal(*scores)),
            "returned": returned,
            "apart": differing(state(one), state(other)),
            "kept": kept,
            "memory": [here, away],
        }
    )
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    start_process_group(device)
    cases = json.loads((folder / "cases.json").read_text())
    results = {name: measure(case, folder, device) for name, case in cases.items()}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_offload_for_engines: updates with and without the state's absence in between."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.system.collectives import gather_objects
from tests.distributed.skip_worker import differing, start, state, train
from tests.support.ranks import measure_cases


def requested() -> int:
    """Bytes of the GPU that tensors have asked for, without what the allocator adds to each."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def measure(case: dict, folder: Path, device: torch.device) -> dict:
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)
    one, other = start(case, mesh, device), start(case, mesh, device)
    offloader = one.policy.offloader
    empty = offloader.offload()  # before the first update there are main weights and no moments
    offloader.reload()
    for trainer in (one, other):
        train(trainer, 1, folder)
    before = state(one)
    weights = sum(p.nbytes for _, p in one.policy.named_parameters())
    gradients = [p.main_grad for _, p in one.policy.named_parameters()]
    kept_for_gradients = {s.data_ptr(): s.nbytes() for g in gradients for s in [g.untyped_storage()]}
    held = offloader.offload()
    again = offloader.offload()
    left = sum(s.nbytes() for s in offloader._storages())
    released = all(g.untyped_storage().nbytes() == 0 for g in gradients)
    scores = [t.policy.logprobs([t.policy.pack([])])[0] for t in (one, other)]
    offloader.reload()
    offloader.reload()
    returned = differing(before, state(one))
    places = {id(b) for buffers in offloader._buffers.values() for b in buffers}
    offloader.offload()
    offloader.reload()
    kept = places == {id(b) for buffers in offloader._buffers.values() for b in buffers}
    here, away, asked = [], [], []
    for _ in range(5 if device.type == "cuda" else 0):
        here.append(torch.cuda.memory_allocated())
        asked.append(requested())
        offloader.offload()
        away.append(torch.cuda.memory_allocated())
        asked[-1] -= requested()
        offloader.reload()
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
            "gradients": sum(kept_for_gradients.values()),
            "memory": [here, away],
            "freed": asked,
        }
    )
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


if __name__ == "__main__":
    measure_cases(measure)

"""One rank of test_offload_for_engines: updates with and without offloading in between."""

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
    """GPU bytes that tensors requested, without the allocator's rounding."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def measure(case: dict, folder: Path, device: torch.device) -> dict:
    mesh = start_mesh(Settings.model_validate(case["settings"]).parallel)
    offloaded, resident = start(case, mesh, device), start(case, mesh, device)
    offloader = offloaded.policy.offloader
    empty = offloader.offload()  # before the first update there are main weights and no moments
    offloader.reload()
    for trainer in (offloaded, resident):
        train(trainer, 1, folder)
    before = state(offloaded)
    weights = sum(p.nbytes for _, p in offloaded.policy.named_parameters())
    gradients = [p.main_grad for _, p in offloaded.policy.named_parameters()]
    kept_for_gradients = {s.data_ptr(): s.nbytes() for g in gradients for s in [g.untyped_storage()]}
    freed = offloader.offload()
    again = offloader.offload()
    remaining = sum(s.nbytes() for s in offloader._storages())
    released = all(g.untyped_storage().nbytes() == 0 for g in gradients)
    scores = [t.policy.logprobs([t.policy.pack([])])[0] for t in (offloaded, resident)]
    offloader.reload()
    offloader.reload()
    returned = differing(before, state(offloaded))
    places = {id(b) for buffers in offloader._buffers.values() for b in buffers}
    offloader.offload()
    offloader.reload()
    buffers_reused = places == {id(b) for buffers in offloader._buffers.values() for b in buffers}
    loaded, offloaded_memory, requested_bytes = [], [], []
    for _ in range(5 if device.type == "cuda" else 0):
        loaded.append(torch.cuda.memory_allocated())
        requested_bytes.append(requested())
        offloader.offload()
        offloaded_memory.append(torch.cuda.memory_allocated())
        requested_bytes[-1] -= requested()
        offloader.reload()
    for trainer in (offloaded, resident):
        train(trainer, 2, folder)
    everyone = gather_objects(
        {
            "bytes": [empty, freed, again, remaining, weights],
            "released": released,
            "scores": bool(torch.equal(*scores)),
            "returned": returned,
            "apart": differing(state(offloaded), state(resident)),
            "kept": buffers_reused,
            "gradients": sum(kept_for_gradients.values()),
            "memory": [loaded, offloaded_memory],
            "freed": requested_bytes,
        }
    )
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


if __name__ == "__main__":
    measure_cases(measure)

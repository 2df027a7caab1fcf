"""One rank of test_batch_scatter: a batch goes out, log-probs come back, in each layout that is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch_scatter import BatchScatter, each


def make_batch(count: int, longest: int, seed: int) -> list[Trajectory]:
    """Trajectories of uneven lengths, every number of which is another."""
    draw = np.random.default_rng(seed)
    batch = []
    for i in range(count):
        prompt, response = int(draw.integers(1, 9)), int(draw.integers(1, longest))
        batch.append(
            Trajectory(
                prompt_id=int(draw.integers(0, 10**6)),
                sample=i % 4,
                group=i // 4,
                prompt=draw.integers(0, 150_000, prompt).astype(np.int32),
                response=draw.integers(0, 150_000, response).astype(np.int32),
                behaviour=draw.normal(size=response).astype(np.float32),
                versions=np.full(response, 3, np.int32),
                finish=("stop", "length")[i % 2],
                text="a text that no other rank needs" * 50,
                advantage=float(draw.normal()),
            )
        )
    return batch


def scored(t: Trajectory) -> np.ndarray:
    """What stands for a trajectory's log-probs: a function of its tokens."""
    return (t.response * 0.5 - t.sample).astype(np.float32)


def describe(t: Trajectory) -> list[object]:
    """What an update may see of a trajectory."""
    tokens = [t.prompt.tolist(), t.response.tolist(), t.behaviour.tolist()]
    return [*tokens, t.finish, float(np.float32(t.advantage)), t.prompt_id, t.group, t.sample]


def measure(parallel: dict[str, int]) -> dict[str, object]:
    mesh = start_mesh(ParallelSettings(**parallel))
    scatter = BatchScatter(mesh)
    found: dict[str, object] = {}
    for step, count in enumerate((16, 8)):  # a second batch is no remnant of the first
        batch = make_batch(count, 40, step) if mesh.rank == 0 else []
        lengths = [t.length for t in batch]
        plan = plan_batches(lengths, minibatches=2, data=mesh.data, budget=64) if batch else []
        share = scatter.scatter(plan, batch)
        for t in each(share):
            t.old = scored(t)
        scatter.gather("old", share)
        everyone = gather_objects([[[describe(t) for t in micro] for micro in mini] for mini in share])
        if mesh.rank == 0:
            found[f"shares {step}"] = everyone
            found[f"wanted {step}"] = [
                [[[describe(batch[i]) for i in micro] for micro in mini] for mini in part] for part in plan
            ]
            found[f"returned {step}"] = all(np.array_equal(t.old, scored(t)) for t in batch)
    found["data ranks"] = gather_objects(mpu.get_data_parallel_rank())
    found["replicas"] = [mesh.replica(d) for d in range(mesh.data)]
    found["texts"] = gather_objects([t.text for t in each(share)])
    mpu.destroy_model_parallel()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    start_process_group(start_device("cpu"))
    layouts = json.loads((folder / "layouts.json").read_text())
    results = {name: measure(parallel) for name, parallel in layouts.items()}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

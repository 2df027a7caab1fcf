"""One rank of test_trace_layouts: traces a batch in several layouts of this world size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rpg_megatron.policy.runtime import start_device, start_process_group  # isort: skip

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.evaluation.drift import Chain, StoredWeights
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.trace import trace_policy
from rpg_megatron.training.audit import trainer_side
from tests.distributed.checkpoint_policy import checkpoint_policy


def batch(vocab: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    found = []
    for i, (prompt, response) in enumerate([(5, 9), (17, 4), (3, 12)]):
        tokens = rng.integers(vocab, size=prompt + response).astype(np.int32)
        nothing = np.zeros(response, np.float32)
        versions = np.zeros(response, np.int32)
        found.append(
            Trajectory(i, 0, tokens[:prompt], tokens[prompt:], nothing, versions, finish="length", text="")
        )
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        settings = Settings.model_validate(case)
        mesh = start_mesh(settings.parallel)
        shape = read_model_shape(settings.model.path)
        policy = checkpoint_policy(settings, mesh, device)
        trajectories = batch(shape.vocab_size)
        # Two micro-batches: what a hook keeps must be told apart.
        packs = [policy.pack(trajectories[:2]), policy.pack(trajectories[2:])]
        traced = trace_policy(policy, shape, packs)
        if mesh.rank == 0:
            side = trainer_side(trajectories, packs, traced)
            weights = StoredWeights(settings.model.path)
            chain = Chain(side, shape, weights, settings.rollout.temperature)
            results[name] = {
                "links": {site: chain.error(site) for site in chain.sites()}
                | {"logp": chain.logprob_error()},
                "shapes": {site: list(values.shape) for site, values in side.trace.items()},
            }
        mpu.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

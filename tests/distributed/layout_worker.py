"""One rank of test_layouts: score and update a fixed batch in several layouts of this world size."""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial
from pathlib import Path

from rpg_megatron.policy.runtime import start_device, start_process_group  # isort: skip

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.bridge.hf_export import export_hf
from rpg_megatron.bridge.hf_import import load_hf_weights
from rpg_megatron.bridge.layouts import layout_for
from rpg_megatron.bridge.plan import Placement
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.objectives import Clip, aggregate, rpg_loss
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy


def measure(name: str, settings: Settings, folder: Path, device: torch.device) -> dict:
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)

    def load(policy: Policy) -> None:
        load_hf_weights(
            settings.model.path,
            policy.named_parameters(),
            layout_for(shape),
            tensor=mesh.tensor,
            tensor_rank=mesh.tensor_rank,
            layer_offset=policy.layer_offset,
            vocab_multiple=settings.model.vocab_multiple,
        )

    policy = Policy(settings, shape, mesh, device, load)
    trajectories = pickle.loads((folder / "batch.pkl").read_bytes())
    plan = plan_batches(
        [t.length for t in trajectories],
        minibatches=settings.training.minibatches,
        data=mesh.data,
        budget=settings.training.tokens_per_microbatch,
    )[mesh.data_rank]
    scored: dict[int, list] = {}
    packs = [policy.pack([trajectories[i] for i in micro]) for mini in plan for micro in mini]
    for pack, values in zip(packs, policy.logprobs(packs), strict=True):
        for row, what in enumerate(("logp", "entropy")):
            for trajectory, part in pack.split(values[row]):
                scored.setdefault(trajectory.prompt_id, []).append((what, part.tolist()))
    loss = partial(rpg_loss, divergence="urkl", beta=0.05, clip=Clip())
    updates = []
    for mini in plan:
        packs = [policy.pack([trajectories[i] for i in micro]) for micro in mini]
        updates.append(
            policy.update(
                packs,
                lambda logp, t: loss(logp, t.old, t.advantages, anchor_logp=t.anchor),
                aggregate,
                lr=1e-3,
            )
        )
    # Every trajectory is scored by every rank here, so that one rank can be read alone.
    packs = [policy.pack([t]) for t in trajectories]
    after = [
        part.tolist()
        for pack, values in zip(packs, policy.logprobs(packs), strict=True)
        for _, part in pack.split(values[0])
    ]
    placement = Placement(
        rank=mesh.rank,
        tensor=mesh.tensor,
        tensor_rank=mesh.tensor_rank,
        pipeline_rank=mesh.pipeline_rank,
        layer_offset=policy.layer_offset,
        data_rank=mesh.data_rank,
        context_rank=0,
        vocab_multiple=settings.model.vocab_multiple,
    )
    params = dict(policy.named_parameters())
    export_hf(
        folder / f"hf-{name}", settings.model.path, params, layout_for(shape), placement, dtype=torch.float32
    )
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, scored if mesh.reports else {})
    mpu.destroy_model_parallel()
    return {
        "scored": {k: v for part in everyone for k, v in part.items()},
        "after": after,
        "updates": [
            {"grad_norm": u.grad_norm, "tokens": u.tokens, "loss": u.loss, **u.means} for u in updates
        ],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    cases = json.loads((folder / "cases.json").read_text())
    results = {
        name: measure(name, Settings.model_validate(raw), folder, device) for name, raw in cases.items()
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

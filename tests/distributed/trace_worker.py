"""One rank of test_trace_layouts: traces a batch in several layouts of this world size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from rpg_megatron.checkpoints.parameter_readers import stored_weights
from rpg_megatron.commands.audit.compare_engines import trainer_side
from rpg_megatron.commands.audit.module_check import ModuleChecker
from rpg_megatron.commands.audit.trace_megatron import trace_policy
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from tests.support.rank_policy import checkpoint_policy


def batch(vocab: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    rows = []
    for i, (prompt, response) in enumerate([(5, 9), (17, 4), (3, 12)]):
        tokens = rng.integers(vocab, size=prompt + response).astype(np.int32)
        nothing = np.zeros(response, np.float32)
        versions = np.zeros(response, np.int32)
        rows.append(
            Trajectory(i, 0, tokens[:prompt], tokens[prompt:], nothing, versions, finish="length", text="")
        )
    return rows


class NormAndLinear(nn.Module):
    """A linear layer that norms what comes in, as Transformer Engine's fused layers do."""

    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear(self.norm(x))


def fuse_norms(policy: Policy) -> None:
    """Put the norms where Transformer Engine's dense layers have them, with an identity in their place."""
    for chunk in policy.chunks:
        for layer in chunk.decoder.layers:
            attention, mlp = layer.self_attention, layer.mlp
            attention.linear_qkv = NormAndLinear(layer.input_layernorm, attention.linear_qkv)
            mlp.linear_fc1 = NormAndLinear(layer.pre_mlp_layernorm, mlp.linear_fc1)
            layer.input_layernorm, layer.pre_mlp_layernorm = IdentityOp(), IdentityOp()


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        fused = case.pop("fused")
        settings = Settings.model_validate(case)
        mesh = start_mesh(settings.parallel)
        shape = read_model_shape(settings.model.path)
        policy = checkpoint_policy(settings, mesh, device)
        if fused:
            fuse_norms(policy)
        trajectories = batch(shape.vocab_size)
        # Two micro-batches, whose values a hook must keep apart.
        packs = [policy.pack(trajectories[:2]), policy.pack(trajectories[2:])]
        traced = trace_policy(policy, shape, packs)
        if mesh.rank == 0:
            side = trainer_side(trajectories, packs, traced)
            weights = stored_weights(settings.model.path)
            checker = ModuleChecker(side, shape, weights, settings.rollout.temperature)
            results[name] = {
                "links": {site: checker.error(site) for site in checker.sites()}
                | {"logp": checker.logprob_error()},
                "shapes": {site: list(values.shape) for site, values in side.trace.items()},
            }
        mpu.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

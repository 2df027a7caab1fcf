"""A trace of the policy is that of the whole model, however it is cut over ranks and stages.

Why: the audit compares shares of heads and columns that ranks hold in Megatron's own order; one that is put
together wrongly would be reported as a fault of the weights. Every step must follow from the ones before it
by the Hugging Face weights. Transformer Engine's dense layers compute norms within the linear layers behind
them: those values cannot be observed, and the identity in their place must not be taken for them.
Not covered: the engine's share (tests/integration/test_audit.py), GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from rpg_megatron.checkpoints.parameter_readers import stored_weights
from rpg_megatron.commands.audit.compare_engines import trainer_side
from rpg_megatron.commands.audit.module_check import ModuleChecker
from rpg_megatron.commands.audit.trace_megatron import trace_policy
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from tests.support.rank_policy import checkpoint_policy
from tests.support.ranks import ranks
from tests.support.tiny_models import CONFIGS


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


@ranks(4)
def trace(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, case in cases.items():
        fused = case.pop("fused")
        settings = Settings.model_validate(case)
        mesh = start_mesh(settings.parallel)
        shape = read_model_shape(settings.model.path)
        policy = checkpoint_policy(settings, mesh, torch.device("cpu"))
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
    return results


LAYOUTS = {
    "TP4+SP, fewer groups than ranks": ("qwen3", {"tensor": 4, "sequence": True}),
    "TP2xPP2+SP, uneven stages": ("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    "CP2xTP2+SP": ("qwen3", {"context": 2, "tensor": 2, "sequence": True}),
    "TP2xDP2, biases, no norms of heads": ("qwen2", {"tensor": 2, "data": 2}),
    "TP2+SP, EP4": ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 4, "data": 2}),
    "PP2xTP2+SP, ETP2": ("qwen3_moe", {"pipeline": 2, "tensor": 2, "sequence": True, "expert_tensor": 2}),
    "TP2xPP2+SP, fused norms": ("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
}


def test_every_step_follows_in_every_layout(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    models = {
        "qwen3": make_checkpoint(tmp_path / "qwen3", num_hidden_layers=3),
        "qwen2": make_checkpoint(
            tmp_path / "qwen2", architectures=["Qwen2ForCausalLM"], model_type="qwen2", num_hidden_layers=3
        ),
        # The first of three layers is dense.
        "qwen3_moe": make_checkpoint(
            tmp_path / "moe", **CONFIGS["qwen3_moe"] | {"num_hidden_layers": 3, "mlp_only_layers": [0]}
        ),
    }
    cases = {
        name: {
            "fused": "fused norms" in name,
            "model": {"path": str(models[family]), "vocab_multiple": 5},
            "precision": {"dtype": "float32"},
            "parallel": parallel,
            "rollout": {"temperature": 0.9},
            "data": {"path": "unused.jsonl"},
        }
        for name, (family, parallel) in LAYOUTS.items()
    }
    results = trace(tmp_path, cases)
    for name, (family, _) in LAYOUTS.items():
        links, shapes = results[name]["links"], results[name]["shapes"]
        fused = {"input_norm", "mlp_norm"} if "fused norms" in name else set()
        assert {site.rpartition(".")[2] for site in links}.isdisjoint(fused), name
        parts = (15 if family == "qwen2" else 17) - len(fused)
        fewer = 2 * 2 if family == "qwen3_moe" else 0  # router and experts in place of four sites
        assert len(links) == 3 * parts - fewer + 3, name  # the last norm, what goes into it, the log-probs
        assert max(links.values()) < 1e-5, (name, links)
        # 13 + 20 + 14 places; 4 query and 2 key/value heads of 32, 128 columns.
        assert shapes["layers.2.query_rope"] == [47, 128], name
        assert shapes["layers.0.key"] == [47, 64], name
        assert shapes["layers.0.gate"] == [47, 128], name
        if family == "qwen3_moe":
            assert shapes["layers.1.router"] == [47, 8], name
            assert shapes["layers.2.experts"] == [47, 64], name

"""One rank of test_layouts: score and update a fixed batch in several layouts of this world size."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import nullcontext
from itertools import batched
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.row_layout import shareable
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy import delta_net, latent_attention, layers
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.delta_net import DeltaNet, _convolve
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.latent_attention import LatentSelfAttention, ReplicatedLinear
from rpg_megatron.policy.layers import ResidualAdd, RMSNorm
from rpg_megatron.policy.length_groups import group_by_length
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.rotary import Rotary
from rpg_megatron.policy.router_aux_loss import Router
from rpg_megatron.policy.router_replay import change_metrics, count_changes
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.rank_policy import checkpoint_policy, checkpoint_teacher, cut_unevenly

_CPU = torch.device("cpu")
_build, _route = DeltaNet.__init__, Router.forward
_build_latent, _build_replicated = LatentSelfAttention.__init__, ReplicatedLinear.__init__
PLANTS: dict[str, tuple[Any, str, Any]] = {
    "no norm behind blocks": (ResidualAdd, "_add", lambda self, out, residual, dropout: residual + out[0]),
    "each rank's own heads": (layers, "_mean", lambda x, group: x.mean(-1, keepdim=True)),
    "no gate of the shared expert": (SharedExpertMLP, "forward", lambda self, x: MLP.forward(self, x)[0]),
    "no shared expert": (SharedExpertMLP, "forward", lambda self, x: torch.zeros_like(x)),
    "no bias of the router": (Router, "forward", lambda self, *a, **k: _unbiased(self, *a, **k)),
    "no gate": (SelfAttention, "_apply_output_gate", lambda self, x, gate: x),
    "weights without 1": (RMSNorm, "forward", lambda self, x: _norm(self, x, False)),
    "a 1 too many": (RMSNorm, "forward", lambda self, x: _norm(self, x, True)),
    "each rank's own gradient": (DeltaNet, "__init__", lambda self, *a, **k: _unmarked(self, *a, **k)),
    "halves as pairs": (latent_attention, "Rotary", lambda rope, dim, interleaved: Rotary(rope, dim)),
    "no norm of the latent": (
        LatentSelfAttention,
        "__init__",
        lambda self, *a, **k: _without(self, "kv_layernorm", *a, **k),
    ),
    "no norm of the queries' latent": (
        LatentSelfAttention,
        "__init__",
        lambda self, *a, **k: _without(self, "q_layernorm", *a, **k),
    ),
    # As Megatron's column-parallel layers do whose output is gathered.
    "each rank's own heads' key": (
        latent_attention,
        "gather_tokens",
        lambda x, config, group: gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False, group=group
        ),
    ),
    "each rank's own tokens": (
        ReplicatedLinear,
        "__init__",
        lambda self, *a: _own_tokens(self, *a),
    ),
    "earlier tokens": (delta_net, "_convolve", lambda x, w, places: _convolve(x, w, places + w.size(1))),
    "an earlier state": (delta_net, "_groups", lambda lengths: group_by_length([sum(lengths)], _CPU)),
    "rounded rates": (
        DeltaNet,
        "_compute_g_and_beta",
        lambda self, rates, *rest: GatedDeltaNet._compute_g_and_beta(self, rates.bfloat16().float(), *rest),
    ),
}
"""Faults that a case may name: what is replaced by what."""


def _norm(norm: RMSNorm, x: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    return layers._Normalise.apply(x, norm.weight, norm.eps, None, zero_centred)


def _unmarked(layer: DeltaNet, *arguments: Any, **more: Any) -> None:
    _build(layer, *arguments, **more)
    layer.out_norm.weight.sequence_parallel = False


def _without(layer: LatentSelfAttention, norm: str, *arguments: Any, **more: Any) -> None:
    _build_latent(layer, *arguments, **more)
    layer.get_submodule(norm).forward = lambda x: x


def _own_tokens(linear: ReplicatedLinear, *arguments: Any) -> None:
    _build_replicated(linear, *arguments)
    linear.weight.sequence_parallel = False


def _unbiased(router: Router, *arguments: Any, **more: Any) -> Any:
    before = router.expert_bias.data
    router.expert_bias.data = torch.zeros_like(before)
    try:
        return _route(router, *arguments, **more)
    finally:
        router.expert_bias.data = before


def measure(name: str, case: dict, mesh: Mesh, folder: Path, device: torch.device) -> dict:
    """The results of a case, with its fault, if it names one."""
    plant = case.get("plant")
    with patch.object(*PLANTS[plant]) if plant else nullcontext():
        return measure_layout(name, case, mesh, folder, device)


def measure_layout(name: str, case: dict, mesh: Mesh, folder: Path, device: torch.device) -> dict:
    settings = Settings.model_validate(case["settings"])
    shape = read_model_shape(settings.model.path)
    layout = mapping_for(shape)
    policy = checkpoint_policy(settings, mesh, device)
    trajectories = pickle.loads((folder / case.get("batch", "batch.pkl")).read_bytes())
    if case["microbatches"]:
        mini = cut_unevenly(trajectories, case["microbatches"], mesh)
    else:
        budget = settings.training.tokens_per_microbatch
        lengths, least = [t.length for t in trajectories], settings.training.shared_from
        prompts = [
            (t.prompt.tobytes(), shareable(len(t.prompt), len(t.response), least)) for t in trajectories
        ]
        (plan,) = plan_batches(
            lengths,
            minibatches=1,
            data=mesh.data,
            budget=budget,
            context=mesh.context,
            attention_length=shape.attention_length,
            prompts=None if least is None else prompts,
        )[mesh.data_rank]
        mini = [[trajectories[i] for i in micro] for micro in plan]
    packs = [policy.pack(micro) for micro in mini]
    teacher = checkpoint_teacher(settings, mesh, device)
    scored: dict[int, list] = {}
    for pack in packs if policy.replayed else ():
        if pack.packed.routes is not None:
            pack.packed.routes.start_counting()
    of_teacher = teacher.logprobs(packs) if teacher else []
    for pack, values in zip(packs, policy.logprobs(packs), strict=True):
        for row, kind in enumerate(("logp", "entropy")):
            for trajectory, part in pack.split(values[row]):
                scored.setdefault(trajectory.prompt_id, []).append((kind, part.tolist()))

    changes = change_metrics(count_changes(packs, mesh), policy.replayed) if policy.replayed else {}
    for pack in packs if policy.replayed else ():
        if pack.packed.routes is not None:
            pack.packed.routes.changed = None
    gradients: dict[str, torch.Tensor] = {}
    step = policy._optimizer.step

    def watched() -> object:
        gradients.update({n: p.main_grad.clone() for n, p in policy.trained_parameters()})
        return step()

    policy._optimizer.step = watched
    for pack, values in zip(packs, of_teacher, strict=bool(teacher)):
        for trajectory, part in pack.split(values[0]):
            scored.setdefault(trajectory.prompt_id, []).append(("teacher", part.tolist()))
    if teacher and settings.full_divergence is not None:
        packs = teacher.with_rows(packs, settings.full_divergence)
    anchor = HeldAnchor([p for _, p in policy.trained_parameters()], settings.anchor)
    before = [packs[: case["before"]]] if "before" in case else []
    updates = [*before, *[packs] * case["updates"]]
    # One step of several mini-batches, or several steps.
    for in_step in [updates] if case["one_step"] else [[packs] for packs in updates]:
        with policy.updating():
            for update_packs in in_step:
                update = policy.update(
                    update_packs, build_loss(settings), build_aggregator(settings), lr=case["lr"]
                )

    def logprobs() -> list[list[float]]:
        """Every rank scores every trajectory, so that one rank's result suffices."""
        packs = [policy.pack(list(group)) for group in batched(trajectories, 3)]
        scored = zip(packs, policy.logprobs(packs), strict=True)
        return [part.tolist() for pack, values in scored for _, part in pack.split(values[0])]

    after = logprobs() if case["after"] else []
    weights = [p.detach().clone() for _, p in policy.named_parameters()]
    with anchor.swapped_in():
        anchored = logprobs() if case["after"] else []
    for (parameter, p), before in zip(policy.named_parameters(), weights, strict=True):
        assert torch.equal(p, before), f"{parameter} is not what it was before the anchor took its turn"
    placement = mesh.coordinates(settings.model.vocab_multiple)
    source = settings.model.path
    export_hf(
        folder / "weights" / name,
        source,
        policy.complete_weights(torch.float32),
        layout,
        placement,
        dtype=torch.float32,
    )
    if settings.lora is None:
        frozen = {n: p for n, p in policy.named_parameters() if not p.requires_grad}
        assert all(p.grad is None for p in frozen.values())
        gradients |= {n: torch.zeros_like(p) for n, p in frozen.items()}
        export_hf(folder / "gradients" / name, source, gradients, layout, placement, dtype=torch.float32)
    else:
        mapping = AdapterMapping(shape, settings.lora)
        trained = dict(policy.trained_parameters())
        for kind, params in (("adapters", trained), ("gradients", gradients)):
            export_adapter(folder / kind / name, params, mapping, placement, source, dtype=torch.float32)
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, scored if mesh.reports else {})
    cuts: list = [None] * mesh.world
    ids = [[t.prompt_id for t in micro] for micro in mini]
    dist.all_gather_object(cuts, ids if mesh.reports else [])
    names: list = [None] * mesh.world
    dist.all_gather_object(names, [name for name, _ in policy.named_parameters()])
    return {
        "scored": {k: v for part in everyone for k, v in part.items()},
        "after": after,
        "anchored": anchored,
        "names": names,
        "changes": changes,
        "computed": sum(pack.tokens_computed for pack in packs),
        "micro_batches": [micro for part in cuts for micro in part],
        "update": {
            "grad_norm": update.grad_norm,
            "tokens": update.tokens,
            "loss": update.loss,
            "abs_loss": update.abs_loss,
            "aux_loss": update.aux_loss,
            **update.metrics,
        },
    }


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    for kind in ("weights", "gradients"):
        (folder / kind).mkdir(exist_ok=True)
    cases = json.loads((folder / "cases.json").read_text())
    results: dict[str, dict] = {}
    cut, mesh = None, None
    for name, case in cases.items():
        parallel = Settings.model_validate(case["settings"]).parallel
        if mesh is None or parallel != cut:  # threads of gloo outlive their groups: no new ones without need
            if mesh is not None:
                mpu.destroy_model_parallel()
            cut, mesh = parallel, start_mesh(parallel)
        results[name] = measure(name, case, mesh, folder, device)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Router replay: the trainer uses the experts that the engine chose for each token.

In bfloat16, engine and trainer sometimes choose different experts for the same token, and its log-probs then
differ by much more than rounding. With replay the trainer computes with the engine's choice. The weights of
the chosen experts are still those of the trainer's router, so gradients reach it.

The choice is part of the micro-batch. A hook before each layer's attention receives the micro-batch, in the
forward pass and when a whole layer is recomputed, and passes the choice to the layer's router. So several
micro-batches can be in flight in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.policy.expert_load import in_backward, layers_with_experts
from rpg_megatron.policy.microbatch import MicroBatch, MicroBatchRoutes
from rpg_megatron.policy.model import Mesh
from rpg_megatron.system.collectives import control_group


class _ChosenExperts:
    """Replaces Megatron's RouterReplay in a router, with the same method.

    Megatron's class keeps every target for a later recomputation, and all routers of a process in one list.
    """

    def __init__(self, row: int) -> None:
        self._row = row
        self._routes: MicroBatchRoutes | None = None
        self._rows = slice(None)

    def set_routes(self, routes: MicroBatchRoutes | None, rows: slice) -> None:
        """Use these routes; None: the router chooses. rows: this rank's tokens of the micro-batch."""
        self._routes, self._rows = routes, rows

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, topk] and indices, int64 [tokens, topk], of the chosen experts."""
        if self._routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._routes.experts[self._row, self._rows].long()
        if self._routes.changed is not None and not in_backward():
            _, own_choice = default_compute_topk(scores, topk, num_groups, group_topk)
            replayed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
            self._routes.changed[self._rows] += ~replayed.gather(1, own_choice).all(1)
        return scores.gather(1, chosen), chosen


def install_replay(chunks: Iterable[GPTModel], experts: ExpertShape) -> None:
    """Make this rank's routers use the routes of each micro-batch (``PackedSequences.routes``)."""
    for index, layer in layers_with_experts(chunks):
        chosen = _ChosenExperts(experts.layers.index(index))
        layer.mlp.router.router_replay = chosen
        layer.self_attention.register_forward_pre_hook(
            partial(_set_routes, chosen, layer.config.sequence_parallel), with_kwargs=True
        )


def _set_routes(
    chosen: _ChosenExperts, split: bool, _module: Any, _args: Any, arguments: dict[str, Any]
) -> None:
    """split: sequence parallelism is on, so a router has only some of the row's tokens."""
    routes: MicroBatchRoutes | None = arguments["packed_seq_params"].routes
    rows = slice(None)
    if routes is not None and split:
        size = routes.experts.size(1) // mpu.get_tensor_model_parallel_world_size()
        first = mpu.get_tensor_model_parallel_rank() * size
        rows = slice(first, first + size)
    chosen.set_routes(routes, rows)


def count_changes(micro_batches: Sequence[MicroBatch], mesh: Mesh) -> Tensor:
    """How often the trainer's router would have chosen other experts than were replayed. Collective.

    micro_batches: scored after ``MicroBatchRoutes.start_counting``. All tokens count, prompts included.
    Returns float64 [3]: choices, one for each token and layer, that differ; tokens with a different choice in
    any layer; tokens. The input of a layer depends on the replayed choices of the layers before it.
    """
    replayed = [routes for m in micro_batches if (routes := m.packed.routes) is not None]
    changed = [routes.changed for routes in replayed if routes.changed is not None]
    sums = torch.zeros(3, dtype=torch.float64)
    if changed:
        layers = torch.cat(changed)
        if mesh.pipeline > 1:
            dist.all_reduce(layers, group=mpu.get_pipeline_model_parallel_group())
        real = torch.cat([routes.real for routes in replayed])
        # With sequence parallelism each tensor rank has counted its part of the tokens; without it, there is
        # only one tensor rank.
        if mesh.last_stage:
            changes = layers.masked_fill(~real, 0)
            counts = torch.stack([changes.sum(), (changes > 0).sum(), real.sum() * (mesh.tensor_rank == 0)])
            sums += counts.cpu()
    dist.all_reduce(sums, group=control_group())
    return sums


def change_metrics(sums: Tensor, experts: ExpertShape) -> dict[str, float]:
    """``routes/changed`` and ``changed_tokens``: shares, from the sums of ``count_changes``."""
    pairs, tokens, count = sums.tolist()
    return {
        "routes/changed": pairs / max(count * len(experts.layers), 1),
        "routes/changed_tokens": tokens / max(count, 1),
    }

"""The auxiliary loss for load balancing of experts (``training.router_aux_loss``).

For a micro-batch of T tokens (prompts included, a shared one once, padding excluded) and a layer with E
experts, k per token, it is E x the sum over experts i of f_i p_i. f_i is the fraction of the k T choices of
the router that are expert i; p_i is the mean probability of expert i, with gradient. The value of a
micro-batch counts once for each of its tokens. An update minimises its loss plus the coefficient times the
sum over layers of the mean over all tokens of the update.

Megatron's ``moe_aux_loss_coeff`` is not used. Megatron 0.19.2 weights a micro-batch by its tokens, and
divides the sum by the count of the loss (``aggregation``), which may differ from the number of these tokens.
With a padding mask it also multiplies by the number of tensor and context ranks: it takes the tokens of all
of them for those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.policy.expert_load import layers_with_experts
from rpg_megatron.policy.microbatch import MicroBatch


class RouterAuxLoss:
    """The auxiliary loss of all routers of this rank: its weight in an update, and its value."""

    def __init__(
        self, coefficient: float, chunks: Iterable[GPTModel], experts: ExpertShape, device: torch.device
    ) -> None:
        self._coefficient, self._layers = coefficient, len(experts.layers)
        self._tokens = self._weight = torch.ones((), device=device)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        for _, layer in layers_with_experts(chunks):
            layer.mlp.router.aux_loss = self

    def start_update(
        self, micro_batches: Sequence[MicroBatch], aggregator: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        """Set the weight for an update on these micro-batches of this rank. Collective over the data ranks.

        Megatron divides the gradients of an update by the ``aggregator``'s count over all ranks, so this loss
        is multiplied by that count, which must not depend on the losses. The host does not wait for the
        device.
        """
        sums = torch.zeros(2, dtype=torch.int64, device=self._sum.device)
        for micro_batch in micro_batches:
            response_tokens = micro_batch.response_tokens()
            _, count = aggregator(response_tokens.old, response_tokens)
            tokens = torch.full_like(count, micro_batch.tokens_computed, dtype=torch.int64)
            sums += torch.stack([count.long(), tokens])
        dist.all_reduce(sums, group=mpu.get_data_parallel_group())
        divisor, self._tokens = sums.clamp(min=1).unbind()  # Megatron divides by at least 1 too
        self._weight = (self._coefficient * divisor / self._tokens).float()
        self._sum = torch.zeros_like(self._sum)

    def add_to(self, probs: Tensor, loss: Tensor) -> Tensor:
        """Return ``probs`` unchanged; in the backward pass ``loss`` receives its gradient.

        loss: that of one layer times the tokens of the micro-batch; this rank's term of the sum over tensor
        and context ranks.
        """
        self._sum = self._sum + loss.detach()
        out: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * self._weight)
        return out

    def value(self) -> Tensor:
        """This rank's term of the update's mean over tokens and layers, float64, without the coefficient.

        The sum over all ranks is the mean.
        """
        return self._sum / (self._tokens * self._layers)


class Router(TopKRouter):
    """Megatron's router, with the auxiliary loss of ``RouterAuxLoss`` in updates.

    The bias of a sigmoid router is a parameter without gradient. Megatron's is a buffer, which only a GPU can
    make, and which would be counted and moved with every update.
    """

    aux_loss: RouterAuxLoss | None = None

    def __init__(self, config: TransformerConfig, **more: Any) -> None:
        """As Megatron calls it."""
        super().__init__(config, **more)
        if self.score_function == "sigmoid":
            zeros = torch.zeros(config.num_moe_experts, dtype=torch.float32, device=self.weight.device)
            self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Megatron's method: weights and choice of the experts, both [tokens, experts].

        logits: [tokens, 1, experts]. padding_mask: bool, any shape, True for padding; without one there is no
        auxiliary loss.
        """
        probs, chosen = super().routing(logits)
        # Not in passes without gradient: log-probs, and the first pass of recomputed layers.
        if self.aux_loss is None or padding_mask is None or not torch.is_grad_enabled():
            return probs, chosen
        logits = logits.view(-1, logits.size(-1))
        padding = padding_mask.flatten()
        if len(padding) > len(logits):
            # Megatron 0.19.2 splits the mask over tensor ranks on the first stage of a pipeline only.
            padding = padding.chunk(self.tp_group.size())[self.tp_group.rank()]
        # The router's own choice, also with replay: its load is to be balanced, not the engine's.
        own_choice, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, padding_mask=padding
        )
        counts, _, tokens = get_tokens_per_expert_and_token_count(
            own_choice, self.tp_cp_group, topk=self.topk, with_padding_mask=True
        )
        loss = switch_load_balancing_loss_func(
            scores, counts, tokens.clamp(min=1), self.topk, scores.size(1), moe_aux_loss_coeff=1.0
        )
        return self.aux_loss.add_to(probs, loss * tokens), chosen

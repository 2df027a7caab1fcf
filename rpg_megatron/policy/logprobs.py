"""Log-probability and entropy of tokens without ever holding the logits of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor


class _ChunkedLogProbs(torch.autograd.Function):
    """Chunk by chunk over tokens, forward and again in backward; the vocabulary is cut over the TP ranks.

    The gradient of ``hidden`` is this rank's share; Megatron's region mapping in front of it sums the shares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        valid: int,
        scale: float,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.size(0)
        logp, entropy, normaliser = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(3))
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = _logits(hidden[part], weight, valid, scale)
            top = logits.amax(-1)
            _reduce(top, group, dist.ReduceOp.MAX)
            index, mine = _local(targets[part], first, valid)
            picked = logits.gather(1, index[:, None])[:, 0].sub(top).masked_fill(~mine, 0.0)
            logits.sub_(top[:, None])
            mass = logits.exp()
            total = mass.sum(-1)
            # Rows of a padded vocabulary are -inf with mass 0, and 0 * -inf must count as 0.
            weighted = mass.mul_(logits.masked_fill_(logits == -torch.inf, 0.0)).sum(-1)
            sums = torch.stack([total, weighted, picked])
            _reduce(sums, group, dist.ReduceOp.SUM)
            log_total = sums[0].log()
            logp[part] = sums[2] - log_total
            entropy[part] = log_total - sums[1] / sums[0]
            normaliser[part] = top + log_total
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.first, ctx.valid, ctx.scale, ctx.chunk = first, valid, scale, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor, d_entropy: Tensor) -> Any:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with_entropy = bool((d_entropy != 0).any())
        for start in range(0, hidden.size(0), ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.size(0)))
            log_p = _logits(hidden[part], weight, ctx.valid, ctx.scale).sub_(normaliser[part, None])
            p = log_p.exp()
            if with_entropy:
                # d entropy / d logit_j = -p_j (log p_j + entropy)
                bent = log_p.masked_fill_(log_p == -torch.inf, 0.0).add_(entropy[part, None])
                d_logits = bent.mul_(d_entropy[part, None]).add_(d_logp[part, None]).mul_(p).neg_()
            else:
                d_logits = p.mul_(-d_logp[part, None])
            index, mine = _local(targets[part], ctx.first, ctx.valid)
            d_logits.scatter_add_(1, index[:, None], d_logp[part].masked_fill(~mine, 0.0)[:, None])
            d_logits.mul_(ctx.scale)
            if d_hidden is not None:
                torch.matmul(d_logits.to(weight.dtype), weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), hidden[part].float())
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6


def _logits(hidden: Tensor, weight: Tensor, valid: int, scale: float) -> Tensor:
    logits = torch.matmul(hidden, weight.t()).float().mul_(scale)
    logits[:, valid:] = -torch.inf
    return logits


def _local(targets: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Index of each target in this rank's rows, and whether it lies in them."""
    index = targets - first
    mine = (index >= 0) & (index < valid)
    return index.clamp(0, max(valid - 1, 0)), mine


def _reduce(x: Tensor, group: Any, op: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    vocab: int,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and the entropy of it.

    Shapes: hidden [tokens, hidden], weight [padded vocab / tp, hidden], targets [tokens] int64 -> two of
    [tokens], float32, nats. ``vocab`` is the true vocabulary size; padding rows behind it have probability 0.
    The vocabulary is cut over ``group`` (None: whole); every rank returns the full result, and a gradient of
    ``hidden`` that is its share of the sum over the group. Peak extra memory is about 4 x chunk x vocab/tp x
    4 bytes, forward and backward.
    Raises ValueError if a target lies outside the vocabulary.
    Source: arXiv 2505.17508, section 2 (token-level policy); temperature as in rollout sampling.
    """
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocab):
        raise ValueError(f"a target token lies outside the vocabulary of {vocab}")
    first = 0 if group is None else group.rank() * weight.size(0)
    valid = min(max(vocab - first, 0), weight.size(0))
    return _ChunkedLogProbs.apply(hidden, weight, targets, first, valid, 1.0 / temperature, chunk, group)


def logprob_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Any,
    config: Any,
    **_: Any,
) -> Tensor:
    """Stand in for the output layer of GPTModel.forward (its ``output_processor``).

    ``labels`` [1, t]; ``context`` holds temperature, chunk and vocab. Returns [2, t]: log-probs and
    entropies, float32.
    """
    group = output_layer.tp_group
    weight = output_layer.weight if output_weight is None else output_weight
    if config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=group
        )
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
    logp, entropy = token_logprobs(
        hidden.squeeze(1),
        weight,
        labels.view(-1),
        temperature=context.temperature,
        chunk=context.chunk,
        vocab=context.vocab,
        group=group,
    )
    return torch.stack([logp, entropy])

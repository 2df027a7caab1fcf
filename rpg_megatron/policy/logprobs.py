"""Chunked, vocab-parallel log-probs and entropies: the logits of all tokens are never in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUSE = True
"""Whether GPUs get compiled kernels: not where their memory is simulated."""


class _ChunkedLogProbs(torch.autograd.Function):
    """Computes logits in chunks of tokens, in forward and again in backward.

    The vocabulary is split over the tensor-parallel ranks. The gradient of ``hidden`` is this rank's part of
    a sum, which Megatron's region mapping computes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        valid: int,
        temperature: float,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens, rows = hidden.size(0), weight[:valid]
        logp, entropy, top, log_total = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(4))
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            top[part], sums = _local_sums(hidden[part], rows, targets[part] - first, temperature, group)
            log_total[part] = sums[0].log()
            logp[part] = sums[2] - log_total[part]
            entropy[part] = log_total[part] - sums[1] / sums[0]
        # The normaliser is saved as two terms: their sum would be rounded at the magnitude of the logits.
        ctx.save_for_backward(hidden, weight, targets, top, log_total, entropy)
        ctx.set_materialize_grads(False)  # None for outputs that need no gradient
        ctx.first, ctx.valid, ctx.temperature, ctx.chunk = first, valid, temperature, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None) -> Any:
        hidden, weight, targets, top, log_total, entropy = ctx.saved_tensors
        if d_logp is None:
            d_logp = torch.zeros_like(top)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = weight[: ctx.valid]
        for start in range(0, hidden.size(0) if ctx.valid else 0, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.size(0)))
            index, in_shard = local_rows(targets[part] - ctx.first, rows)
            gradients = d_logp[part], None if d_entropy is None else d_entropy[part]
            # In the model's precision: float32 matrix products are many times slower on a GPU.
            d_logits, d_target = _fused(_logit_gradients, rows)(
                _logits(hidden[part], rows),
                ctx.temperature,
                (top[part], log_total[part], entropy[part]),
                gradients,
                index,
                in_shard,
                weight.dtype,
            )
            d_logits.scatter_(1, index[:, None], d_target[:, None])
            if d_hidden is not None:
                torch.matmul(d_logits, rows, out=d_hidden[part])
            if d_weight is not None and weight.dtype == d_weight.dtype:
                d_weight[: ctx.valid].addmm_(d_logits.t(), hidden[part])
            elif d_weight is not None:
                d_weight[: ctx.valid].add_(torch.matmul(d_logits.t(), hidden[part]))
            del d_logits  # before the next chunk's are allocated
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6


def _local_sums(
    hidden: Tensor, weight: Tensor, index: Tensor, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Largest logit of each token and, with z = logit - largest: sum of exp(z), sum of z exp(z), z of the
    target.

    Shapes: hidden [n, hidden], weight [rows, hidden] without padding rows, index [n]: target relative to the
    first row -> [n], [3, n]. Sums are over the full vocabulary; at most two chunks of logits are in memory.
    """
    if not len(weight):  # this rank has padding rows only
        top = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        reduce_in_group(top, group, dist.ReduceOp.MAX)
        sums = torch.zeros(3, len(hidden), dtype=torch.float32, device=hidden.device)
    else:
        logits = _logits(hidden, weight)
        top = logits.amax(-1).float().div_(temperature)
        reduce_in_group(top, group, dist.ReduceOp.MAX)
        sums = _fused(_sums_of_exponentials, weight)(logits, temperature, top, *local_rows(index, weight))
    reduce_in_group(sums, group, dist.ReduceOp.SUM)
    return top, sums


def _sums_of_exponentials(
    logits: Tensor, temperature: float, top: Tensor, index: Tensor, in_shard: Tensor
) -> Tensor:
    """Of one chunk: logits [n, rows], top [n], index, in_shard [n] -> sums of ``_local_sums`` [3, n]."""
    z = logits.float().div_(temperature).sub_(top[:, None])
    picked = z.gather(1, index[:, None])[:, 0].masked_fill(~in_shard, 0.0)
    mass = z.exp()
    return torch.stack([mass.sum(-1), mass.mul_(z).sum(-1), picked])


def _logit_gradients(
    logits: Tensor,
    temperature: float,
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    index: Tensor,
    in_shard: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradient of one chunk's logits [n, rows] without the targets' own terms; with them, at ``index``, [n].

    saved: largest logit, log of the sum, entropy of each token. gradients: of log-probs and of entropies.
    """
    top, log_total, entropy = saved
    d_logp, d_entropy = gradients
    d_logits = logits.float().div_(temperature).sub_(top[:, None]).sub_(log_total[:, None])
    if d_entropy is not None:
        # d entropy / d logit_j = -p_j (log p_j + entropy)
        p = d_logits.exp()
        d_logits.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logp[:, None])
        d_logits.mul_(p).neg_()
        del p  # frees memory needed below
    else:
        d_logits.exp_().mul_(-d_logp[:, None])
    picked = d_logits.gather(1, index[:, None])[:, 0] + d_logp.masked_fill(~in_shard, 0.0)
    return d_logits.div_(temperature).to(dtype), picked.div_(temperature).to(dtype)


def _logits(hidden: Tensor, rows: Tensor) -> Tensor:
    """Logits in float32, or in the dtype of ``hidden`` if a compiled kernel converts them."""
    logits = torch.matmul(hidden, rows.t())
    return logits if _compiles(logits) else logits.float()


def _compiles(tensor: Tensor) -> bool:
    return FUSE and tensor.is_cuda


def _fused(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """On a GPU, the function compiled to one or two kernels, which do not write float32 intermediate results
    to memory. Elsewhere the function itself.
    """
    return _compiled(function) if _compiles(tensor) else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def local_rows(index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A valid row index for each target, and whether this rank has the target's row."""
    in_shard = (index >= 0) & (index < len(weight))
    return index.clamp(0, len(weight) - 1), in_shard


def reduce_in_group(x: Tensor, group: Any, op: Any) -> None:
    """All-reduce ``x`` in place over ``group``; nothing for None or a group of one rank."""
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
    target_range: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and its entropy.

    Shapes: hidden [tokens, hidden], weight [padded vocab / tp, hidden], targets [tokens] int64 -> two of
    [tokens], float32, nats. ``vocab`` is the true vocabulary size; padding rows after it have probability 0.
    The vocabulary is split over ``group`` (None: not split); every rank returns the full result, and a
    gradient of ``hidden`` that must be summed over the group. At most two chunks of logits are in memory,
    forward and backward: 2 x chunk x vocab/tp x 4 bytes. ``target_range``: smallest and largest target, if
    known; computing them makes the host wait for the device.
    Raises ValueError if a target is outside the vocabulary. Source: arXiv 2505.17508, section 2 (token-level
    policy); temperature as in rollout sampling.
    """
    if target_range is None and targets.numel():
        target_range = int(targets.min()), int(targets.max())
    if target_range is not None and (target_range[0] < 0 or target_range[1] >= vocab):
        raise ValueError(f"a target token lies outside the vocabulary of {vocab}")
    first = 0 if group is None else group.rank() * weight.size(0)
    valid = min(max(vocab - first, 0), weight.size(0))
    result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden, weight, targets, first, valid, temperature, chunk, group
    )
    return result

"""Chunked, vocab-parallel log-probs and entropies: the logits of all tokens are never in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUSE = True
"""Whether GPUs get compiled kernels: not where their memory is simulated."""


@dataclass(frozen=True)
class LogitInputs:
    """What this rank's logits are computed from: hidden W^T + narrow B^T, the latter with an adapter."""

    hidden: Tensor
    """[tokens, hidden]."""
    rows: Tensor
    """[valid, hidden]: this rank's rows of W, without those of padding."""
    narrow: Tensor | None
    """[tokens, rank]: scale A h."""
    b: Tensor | None
    """[valid, rank]: rows of B."""

    @classmethod
    def of(cls, tensors: Sequence[Any], valid: int) -> LogitInputs:
        """tensors: hidden, W, narrow, B, the last two None without an adapter; the matrices with padding."""
        hidden, weight, narrow, b = tensors
        return cls(hidden, weight[:valid], narrow, None if b is None else b[:valid])

    def logits(self, part: slice) -> Tensor:
        """Of these tokens: [n, valid], in the model's dtype. Not for autograd."""
        logits = torch.matmul(self.hidden[part], self.rows.t())
        if self.narrow is None or self.b is None:
            return logits
        return logits.addmm_(self.narrow[part], self.b.t())


class LogitGradients:
    """Gradients of the inputs of ``LogitInputs.of``, from those of the logits of each chunk."""

    def __init__(self, tensors: Sequence[Any], needed: Sequence[bool], valid: int) -> None:
        """needed: for each tensor, whether it has a gradient. Those of matrices are summed in float32."""
        dtypes = (None, torch.float32) * 2
        self._valid, self._tensors = valid, tensors
        self._gradients = [
            torch.zeros_like(x, dtype=dtype) if on and x is not None else None
            for x, on, dtype in zip(tensors, needed, dtypes, strict=True)
        ]

    def add(self, part: slice, d_logits: Tensor) -> None:
        """d_logits: [n, valid] of these tokens, in the model's dtype."""
        for first in (0, 2):
            x, matrix = self._tensors[first : first + 2]
            d_x, d_matrix = self._gradients[first : first + 2]
            if d_x is not None:
                torch.matmul(d_logits, matrix[: self._valid], out=d_x[part])
            if d_matrix is None:
                continue
            if matrix.dtype == d_matrix.dtype:
                d_matrix[: self._valid].addmm_(d_logits.t(), x[part])
            else:
                d_matrix[: self._valid].add_(torch.matmul(d_logits.t(), x[part]))

    def results(self) -> list[Tensor | None]:
        """In the order and the dtypes of the tensors; None where there is none."""
        pairs = zip(self._gradients, self._tensors, strict=True)
        return [None if d is None else d.to(x.dtype) for d, x in pairs]


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
        narrow: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        first: int,
        valid: int,
        temperature: float,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens, inputs = hidden.size(0), LogitInputs.of((hidden, weight, narrow, b), valid)
        logp, entropy, top, log_total = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(4))
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            top[part], sums = _local_sums(inputs, part, targets[part] - first, temperature, group)
            log_total[part] = sums[0].log()
            logp[part] = sums[2] - log_total[part]
            entropy[part] = log_total[part] - sums[1] / sums[0]
        # The normaliser is saved as two terms: their sum would be rounded at the magnitude of the logits.
        ctx.save_for_backward(hidden, weight, narrow, b, targets, top, log_total, entropy)
        ctx.set_materialize_grads(False)  # None for outputs that need no gradient
        ctx.first, ctx.valid, ctx.temperature, ctx.chunk = first, valid, temperature, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None) -> Any:
        *tensors, targets, top, log_total, entropy = ctx.saved_tensors
        if d_logp is None:
            d_logp = torch.zeros_like(top)
        result = LogitGradients(tensors, ctx.needs_input_grad[:4], ctx.valid)
        inputs = LogitInputs.of(tensors, ctx.valid)
        rows, tokens = inputs.rows, targets.size(0)
        for start in range(0, tokens if ctx.valid else 0, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, tokens))
            index, in_shard = local_rows(targets[part] - ctx.first, rows)
            gradients = d_logp[part], None if d_entropy is None else d_entropy[part]
            # In the model's precision: float32 matrix products are many times slower on a GPU.
            d_logits, d_target = _fused(_logit_gradients, rows)(
                _wide(inputs.logits(part)),
                ctx.temperature,
                (top[part], log_total[part], entropy[part]),
                gradients,
                index,
                in_shard,
                rows.dtype,
            )
            d_logits.scatter_(1, index[:, None], d_target[:, None])
            result.add(part, d_logits)
            del d_logits  # before the next chunk's are allocated
        return *result.results(), *[None] * 6


def _local_sums(
    inputs: LogitInputs, part: slice, index: Tensor, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Largest logit of each token and, with z = logit - largest: sum of exp(z), sum of z exp(z), z of the
    target.

    Shapes: index [n]: target relative to the first row -> [n], [3, n]. Sums are over the full vocabulary; at
    most two chunks of logits are in memory.
    """
    weight = inputs.rows
    if not len(weight):  # this rank has padding rows only
        top = weight.new_full((len(index),), -torch.inf, dtype=torch.float32)
        reduce_in_group(top, group, dist.ReduceOp.MAX)
        sums = torch.zeros(3, len(index), dtype=torch.float32, device=weight.device)
    else:
        logits = _wide(inputs.logits(part))
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


def _wide(logits: Tensor) -> Tensor:
    """Logits in float32, or in their dtype if a compiled kernel converts them."""
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


def require_in_vocabulary(targets: Tensor, target_range: tuple[int, int] | None, vocab: int) -> None:
    """Raise ValueError for targets outside the vocabulary; target_range: see ``token_logprobs``."""
    if target_range is None and targets.numel():
        target_range = int(targets.min()), int(targets.max())
    if target_range is not None and (target_range[0] < 0 or target_range[1] >= vocab):
        raise ValueError(f"a target token lies outside the vocabulary of {vocab}")


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
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and its entropy.

    Shapes: hidden [tokens, hidden], weight [padded vocab / tp, hidden], targets [tokens] int64 -> two of
    [tokens], float32, nats. ``vocab`` is the true vocabulary size; padding rows after it have probability 0.
    The vocabulary is split over ``group`` (None: not split); every rank returns the full result, and a
    gradient of ``hidden`` that must be summed over the group. At most two chunks of logits are in memory,
    forward and backward: 2 x chunk x vocab/tp x 4 bytes. ``target_range``: smallest and largest target, if
    known; computing them makes the host wait for the device. ``added``: of an adapter on the output layer,
    scale A h [tokens, rank] and B [padded vocab / tp, rank], whose product is added to the logits; the
    gradient of the first must be summed over the group, too.
    Raises ValueError if a target is outside the vocabulary. Source: arXiv 2505.17508, section 2 (token-level
    policy); temperature as in rollout sampling.
    """
    require_in_vocabulary(targets, target_range, vocab)
    first = 0 if group is None else group.rank() * weight.size(0)
    valid = min(max(vocab - first, 0), weight.size(0))
    result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden, weight, *(added or (None, None)), targets, first, valid, temperature, chunk, group
    )
    return result

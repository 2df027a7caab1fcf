"""Chunked, vocab-parallel log-probs, entropies and divergences to a teacher.

The logits of all tokens are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.policy.divergence import Factors, divergence_factors, likeliest_divergence
from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop

LOGP, ENTROPY, DIVERGENCE = range(3)
"""Rows of the head's result; the last with a teacher only."""

FUSE = True
"""Whether GPUs get compiled kernels: not where their memory is simulated."""


@dataclass(frozen=True)
class Head:
    """Parameters of the log-prob head."""

    temperature: float
    chunk: int
    """Tokens whose logits are in memory at a time."""
    vocab: int
    """Without padding."""
    label_range: tuple[int, int] | None = None
    """Smallest and largest target, if known; computing them makes the host wait for the device."""
    entropy_gradient: bool = False
    """Whether the loss uses the entropies."""
    teacher: TeacherRow | TeacherTop | None = None
    """What the divergence to a teacher is computed from; its distributions are those at temperature 1."""


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


class _ChunkedScores(torch.autograd.Function):
    """Computes logits in chunks of tokens, in forward and again in backward; a chunk's give every row.

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
        head: Head,
        group: Any,
    ) -> tuple[Tensor, ...]:
        first = 0 if group is None else group.rank() * weight.size(0)
        valid = min(max(head.vocab - first, 0), weight.size(0))
        inputs = LogitInputs.of((hidden, weight, narrow, b), valid)
        top = head.teacher if isinstance(head.teacher, TeacherTop) else None
        row = head.teacher if isinstance(head.teacher, TeacherRow) else None
        wanted = targets[:, None] if top is None else torch.cat([targets[:, None], top.ids], 1)
        tokens, sides = hidden.size(0), 1 if row is None else 2  # the policy's logits, and a teacher's
        count = 2 * sides + wanted.size(1)
        largest, sums = (hidden.new_empty(n, tokens, dtype=torch.float32) for n in (sides, count))
        for part in _parts(tokens, head.chunk):
            index = wanted[part] - first
            largest[:, part], sums[:, part] = _local_sums(inputs, part, index, row, head.temperature, group)
        log_total = sums[:sides].log()
        picked = sums[2 * sides :] - log_total[0]
        logp, likely = picked[0].clone(), picked[1:].t()
        entropy, divergence = log_total[0] - sums[sides] / sums[0], None
        if top is not None:
            divergence = likeliest_divergence(top, likely)
        elif row is not None:
            p, q = (0, 1) if row.direction == "rkl" else (1, 0)
            divergence = sums[3] / sums[p] - log_total[p] + log_total[q]
        # The normaliser is saved as two terms: their sum would be rounded at the magnitude of the logits.
        ctx.save_for_backward(
            hidden, weight, narrow, b, targets, largest, log_total, entropy, divergence, likely
        )
        ctx.set_materialize_grads(False)  # None for outputs that need no gradient
        ctx.first, ctx.valid, ctx.head = first, valid, head
        return (logp, entropy) if divergence is None else (logp, entropy, divergence)

    @staticmethod
    def backward(
        ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None, d_divergence: Tensor | None = None
    ) -> Any:
        *tensors, targets, largest, log_total, entropy, divergence, likely = ctx.saved_tensors
        head, inputs = ctx.head, LogitInputs.of(tensors, ctx.valid)
        if d_logp is None:
            d_logp = torch.zeros_like(entropy)
        factors = Factors(-d_logp)
        if d_entropy is not None:  # d entropy / d logit_j = -p_j (log p_j + entropy)
            factors = Factors(-d_logp - entropy * d_entropy, -d_entropy)
        if d_divergence is not None:
            factors = divergence_factors(factors, d_divergence, head.teacher, divergence, likely)
        row = head.teacher if factors.log_q is not None or factors.q is not None else None
        result, rows = LogitGradients(tensors, ctx.needs_input_grad[:4], ctx.valid), inputs.rows
        for part in _parts(targets.size(0) if ctx.valid else 0, head.chunk):
            # In the model's precision: float32 matrix products are many times slower on a GPU.
            d_logits, index, d_target = _fused(_logit_gradients, rows)(
                _wide(inputs.logits(part)),
                None if row is None else _wide(_teacher_logits(row, part, rows)),
                head.temperature,
                (largest[:, part], log_total[:, part]),
                [None if x is None else x[part, None] for x in factors[:4]],
                (targets[part, None] - ctx.first, d_logp[part, None]),
                rows.dtype if factors.likely is None else torch.float32,
            )
            d_logits.scatter_(1, index, d_target)
            if factors.likely is not None:
                index, in_shard = local_rows(head.teacher.ids[part] - ctx.first, len(rows))
                more = factors.likely[part].masked_fill(~in_shard, 0.0) / head.temperature
                d_logits = d_logits.scatter_add_(1, index, more).to(rows.dtype)
            result.add(part, d_logits)
            del d_logits  # before the next chunk's are allocated
        return *result.results(), *[None] * 3


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _teacher_logits(row: TeacherRow, part: slice, rows: Tensor) -> Tensor:
    return torch.matmul(row.part(part, rows.device), row.weight[: len(rows)].t())


def _local_sums(
    inputs: LogitInputs, part: slice, index: Tensor, row: TeacherRow | None, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Of a chunk: the largest logits [sides, n], and the sums of ``_sums_of_exponentials``.

    index [n, m]: wanted tokens relative to the first row. Sides: the policy, and the teacher of ``row``. Sums
    are over the full vocabulary; at most one chunk more than there are sides is in memory.
    """
    rows, sides = inputs.rows, 1 if row is None else 2
    if not len(rows):  # this rank has padding rows only
        largest = rows.new_full((sides, len(index)), -torch.inf, dtype=torch.float32)
        reduce_in_group(largest, group, dist.ReduceOp.MAX)
        sums = largest.new_zeros(2 * sides + index.size(1), len(index))
    else:
        logits = _wide(inputs.logits(part))
        others = None if row is None else _wide(_teacher_logits(row, part, rows))
        own = logits.amax(-1).float().div_(temperature)
        largest = torch.stack([own] if others is None else [own, others.amax(-1).float()])
        reduce_in_group(largest, group, dist.ReduceOp.MAX)
        reverse = row is not None and row.direction == "rkl"
        sums = _fused(_sums_of_exponentials, rows)(logits, others, temperature, largest, reverse, index)
    reduce_in_group(sums, group, dist.ReduceOp.SUM)
    return largest, sums


def _sums_of_exponentials(
    logits: Tensor,
    others: Tensor | None,
    temperature: float,
    largest: Tensor,
    reverse: bool,
    index: Tensor,
) -> Tensor:
    """Of one chunk, with z = logit - largest of the policy and y of the teacher: [2 sides + m, n].

    logits, others [n, rows], largest [sides, n], index [n, m] -> sum of exp(z), of exp(y) with a teacher, of
    z exp(z); of (z - y) exp(z) if reverse, else of (y - z) exp(y); z at ``index``, 0 outside of the rows.
    """
    index, in_shard = local_rows(index, logits.size(1))
    z = logits.float().div_(temperature).sub_(largest[0][:, None])
    picked = z.gather(1, index).masked_fill(~in_shard, 0.0)
    totals, gaps = [], []
    if others is not None:
        y = others.float().sub_(largest[1][:, None])
        q = y.exp()
        totals.append(q.sum(-1))
        y.sub_(z)
        if not reverse:
            gaps.append(q.mul_(y).sum(-1))
        del q  # frees memory needed below
    p = z.exp()
    if others is not None and reverse:
        gaps.append(y.mul_(p).sum(-1).neg_())
    sums = torch.stack([p.sum(-1), *totals, p.mul_(z).sum(-1), *gaps])
    return torch.cat([sums, picked.t()])


def _logit_gradients(
    logits: Tensor,
    others: Tensor | None,
    temperature: float,
    normalisers: tuple[Tensor, Tensor],
    factors: Sequence[Any],
    target: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of one chunk's logits [n, rows] without the targets' own terms; the targets' rows, and the
    gradient with these terms there, [n, 1].

    normalisers: largest logit, log of the sum, [sides, n] each. factors: the first four of ``Factors``,
    [n, 1]. target: relative to the first row, gradient of its log-prob, [n, 1].
    """
    largest, log_total = normalisers
    by_p, by_log_p, by_log_q, by_q = factors
    index, in_shard = local_rows(target[0], logits.size(1))
    x = logits.float().div_(temperature).sub_(largest[0][:, None]).sub_(log_total[0][:, None])
    log_q: Any = None
    if others is not None:
        log_q = others.float().sub_(largest[1][:, None]).sub_(log_total[1][:, None])
    if by_log_p is None:
        x.exp_().mul_(by_p)
    else:
        p = x.exp()
        x.mul_(by_log_p).add_(by_p)
        if by_log_q is not None:
            x.addcmul_(log_q, by_log_q)
        x.mul_(p)
        del p  # frees memory needed below
    if by_q is not None:
        x.addcmul_(log_q.exp_(), by_q)
    picked = x.gather(1, index) + target[1].masked_fill(~in_shard, 0.0)
    return x.div_(temperature).to(dtype), index, picked.div_(temperature).to(dtype)


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


def local_rows(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A valid row index for each target, and whether this rank has the target's row."""
    return index.clamp(0, rows - 1), (index >= 0) & (index < rows)


def reduce_in_group(x: Tensor, group: Any, op: Any) -> None:
    """All-reduce ``x`` in place over ``group``; nothing for None or a group of one rank."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    head: Head,
    *,
    group: Any = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Rows ``LOGP`` and ``ENTROPY``: log-probability of each target under softmax(hidden @ weight.T /
    temperature), and this distribution's entropy; with a teacher ``DIVERGENCE`` to it. All have a gradient.

    Shapes: hidden [tokens, hidden], weight [padded vocab / tp, hidden], targets [tokens] int64 -> [tokens]
    each, float32, nats. Padding rows after the vocabulary have probability 0. The vocabulary is split over
    ``group`` (None: not split), the teacher's alike; every rank returns the full result, and a gradient of
    ``hidden`` that must be summed over the group. At most two chunks of logits are in memory, three with a
    ``TeacherRow``, forward and backward: chunk x vocab/tp x 4 bytes each. ``added``: of an adapter on the
    output layer, scale A h [tokens, rank] and B [padded vocab / tp, rank], whose product is added to the
    logits; the gradient of the first must be summed over the group, too. A ``TeacherTop`` gives a lower bound
    of the divergence: that of its likeliest tokens and one outcome for all others.
    Raises ValueError if a target is outside the vocabulary. Source: arXiv 2505.17508, section 2 (token-level
    policy); temperature as in rollout sampling.
    """
    label_range = head.label_range
    if label_range is None and targets.numel():
        label_range = int(targets.min()), int(targets.max())
    if label_range is not None and (label_range[0] < 0 or label_range[1] >= head.vocab):
        raise ValueError(f"a target token lies outside the vocabulary of {head.vocab}")
    if head.teacher is not None:
        scored = head.teacher.ids if isinstance(head.teacher, TeacherTop) else head.teacher.hidden
        if len(scored) != len(hidden):
            raise ValueError(f"the teacher scored {len(scored)} positions, not {len(hidden)}")
    result: tuple[Tensor, ...] = _ChunkedScores.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden, weight, *(added or (None, None)), targets, head, group
    )
    return result

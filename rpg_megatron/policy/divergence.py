"""Divergence of the policy to a teacher at each token, in chunks: exact, or from likely tokens only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.policy.logprobs import (
    LogitGradients,
    LogitInputs,
    local_rows,
    reduce_in_group,
    require_in_vocabulary,
)
from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop


class _ChunkedDivergence(torch.autograd.Function):
    """Log-probs of the targets, and divergences; logits are computed in forward and again in backward.

    In memory at most three chunks of logits, float32: the policy's, the teacher's, and one for the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        narrow: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        teacher: TeacherRow,
        first: int,
        valid: int,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens, inputs = hidden.size(0), LogitInputs.of((hidden, weight, narrow, b), valid)
        logp, divergence = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2))
        ctx.group, ctx.teacher = group, teacher
        ctx.first, ctx.valid, ctx.chunk = first, valid, chunk
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            own = _log_probs(inputs.logits(part), group)
            others = _log_probs(_teacher_logits(teacher, part, hidden.device, valid), group)
            sums = torch.zeros(2, part.stop - start, dtype=torch.float32, device=hidden.device)
            if valid:
                index, in_shard = local_rows(targets[part] - first, weight[:valid])
                sums[0] = own.gather(1, index[:, None])[:, 0].masked_fill(~in_shard, 0.0)
                if teacher.direction == "rkl":
                    sums[1] = own.exp().mul_(own.sub_(others)).sum(-1)
                else:
                    sums[1] = others.exp().mul_(others.sub_(own)).sum(-1)
            reduce_in_group(sums, group, dist.ReduceOp.SUM)
            logp[part], divergence[part] = sums
            del own, others
        ctx.save_for_backward(hidden, weight, narrow, b, targets, divergence)
        ctx.set_materialize_grads(False)
        return logp, divergence

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_divergence: Tensor | None) -> Any:
        *tensors, targets, divergence = ctx.saved_tensors
        teacher, zeros = ctx.teacher, torch.zeros_like(divergence)
        d_logp, d_divergence = (zeros if d is None else d for d in (d_logp, d_divergence))
        result = LogitGradients(tensors, ctx.needs_input_grad[:4], ctx.valid)
        inputs = LogitInputs.of(tensors, ctx.valid)
        rows, tokens = inputs.rows, targets.size(0)
        for start in range(0, tokens, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, tokens))
            own = _log_probs(inputs.logits(part), ctx.group)
            others = _log_probs(_teacher_logits(teacher, part, rows.device, ctx.valid), ctx.group)
            if not ctx.valid:
                continue
            if teacher.direction == "rkl":  # d KL / d z_j = p_j (log p_j - log q_j - KL)
                d_logits = others.neg_().add_(own).sub_(divergence[part, None]).mul_(d_divergence[part, None])
                p = own.exp_()
                d_logits.mul_(p)
            else:  # p_j - q_j
                p = own.exp_()
                d_logits = others.exp_().neg_().add_(p).mul_(d_divergence[part, None])
            d_logits.sub_(p.mul_(d_logp[part, None]))
            index, in_shard = local_rows(targets[part] - ctx.first, rows)
            d_target = d_logp[part].masked_fill(~in_shard, 0.0)
            d_logits.scatter_add_(1, index[:, None], d_target[:, None])
            del own, others, p
            d_logits = d_logits.to(rows.dtype)
            result.add(part, d_logits)
            del d_logits
        return *result.results(), *[None] * 6


class _ChunkedTopDivergence(torch.autograd.Function):
    """As ``_ChunkedDivergence``, over the teacher's likeliest tokens and one outcome for all others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        narrow: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        teacher: TeacherTop,
        first: int,
        valid: int,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens, k = hidden.size(0), teacher.ids.size(1)
        inputs = LogitInputs.of((hidden, weight, narrow, b), valid)
        logp, divergence, rest = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(3))
        top = hidden.new_empty(tokens, k, dtype=torch.float32)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            wanted = torch.cat([targets[part, None], teacher.ids[part]], 1)
            own = _log_probs(inputs.logits(part), group)
            picked = torch.zeros(wanted.shape, dtype=torch.float32, device=hidden.device)
            if valid:
                index, in_shard = local_rows(wanted - first, inputs.rows)
                picked = own.gather(1, index).masked_fill(~in_shard, 0.0)
            reduce_in_group(picked, group, dist.ReduceOp.SUM)
            logp[part], top[part] = picked[:, 0], picked[:, 1:]
            q, log_q_rest, log_p_rest = teacher.logps[part], *map(_rest, (teacher.logps[part], top[part]))
            pairs = (top[part], log_p_rest, q, log_q_rest)
            x, x_rest, y, y_rest = pairs if teacher.direction == "rkl" else pairs[2:] + pairs[:2]
            value = (x.exp() * (x - y)).sum(-1) + x_rest.exp() * (x_rest - y_rest)
            divergence[part], rest[part] = value * teacher.known[part], log_p_rest
        ctx.save_for_backward(hidden, weight, narrow, b, targets, divergence, top, rest)
        ctx.teacher, ctx.group = teacher, group
        ctx.first, ctx.valid, ctx.chunk = first, valid, chunk
        ctx.set_materialize_grads(False)
        return logp, divergence

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_divergence: Tensor | None) -> Any:
        *tensors, targets, divergence, top, rest = ctx.saved_tensors
        teacher, zeros = ctx.teacher, torch.zeros_like(divergence)
        d_logp, d_divergence = (zeros if d is None else d for d in (d_logp, d_divergence))
        d_divergence = d_divergence * teacher.known
        q, q_rest = teacher.logps, _rest(teacher.logps)
        if teacher.direction == "rkl":  # d / d z_j is p_j times these, for likely tokens and for the others
            likely = top - q - divergence[:, None]
            others = rest - q_rest - divergence
        else:
            likely = 1 - (q - top).exp()
            others = 1 - (q_rest - rest).exp()
        result = LogitGradients(tensors, ctx.needs_input_grad[:4], ctx.valid)
        inputs = LogitInputs.of(tensors, ctx.valid)
        rows, tokens = inputs.rows, targets.size(0)
        for start in range(0, tokens, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, tokens))
            d_logits = _log_probs(inputs.logits(part), ctx.group).exp_()
            if not ctx.valid:
                continue
            d_logits.mul_((others * d_divergence - d_logp)[part, None])
            index, in_shard = local_rows(teacher.ids[part] - ctx.first, rows)
            more = top[part].exp() * (likely[part] - others[part, None]) * d_divergence[part, None]
            d_logits.scatter_add_(1, index, more.masked_fill(~in_shard, 0.0))
            index, in_shard = local_rows(targets[part] - ctx.first, rows)
            d_logits.scatter_add_(1, index[:, None], d_logp[part].masked_fill(~in_shard, 0.0)[:, None])
            d_logits = d_logits.to(rows.dtype)
            result.add(part, d_logits)
            del d_logits
        return *result.results(), *[None] * 6


def _rest(logps: Tensor) -> Tensor:
    """Log of the probability that is left by those of the last dimension."""
    return torch.log1p(-logps.exp().sum(-1).clamp(max=1 - 1e-7))


def _teacher_logits(teacher: TeacherRow, part: slice, device: torch.device, valid: int) -> Tensor:
    return torch.matmul(teacher.part(part, device), teacher.weight[:valid].t())


def _log_probs(logits: Tensor, group: Any) -> Tensor:
    """Log-probs of this rank's part of the vocabulary, [n, rows], float32. Collective over the group."""
    logits = logits.float()
    top = logits.new_full((len(logits),), -torch.inf)
    if logits.size(1):
        torch.amax(logits, -1, out=top)
    reduce_in_group(top, group, dist.ReduceOp.MAX)
    logits.sub_(top[:, None])
    total = logits.exp().sum(-1)
    reduce_in_group(total, group, dist.ReduceOp.SUM)
    return logits.sub_(total.log_()[:, None])


def token_divergences(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: TeacherRow | TeacherTop,
    *,
    chunk: int,
    vocab: int,
    group: Any = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the policy's divergence to the teacher at its place: two of [tokens].

    Parameters as in ``token_logprobs``, at temperature 1; the teacher has the same vocabulary, split alike.
    float32, nats, both with gradient, of the policy only. A ``TeacherTop`` gives a lower bound of the
    divergence: that of its likeliest tokens and one outcome for all others.
    """
    if not targets.is_cuda:  # else the host would wait, so ``logprob_head`` checks what it knows of them
        require_in_vocabulary(targets, None, vocab)
    scored = teacher.ids if isinstance(teacher, TeacherTop) else teacher.hidden
    if scored.size(0) != hidden.size(0):
        raise ValueError(f"the teacher scored {scored.size(0)} positions, not {hidden.size(0)}")
    first = 0 if group is None else group.rank() * weight.size(0)
    valid = min(max(vocab - first, 0), weight.size(0))
    function: Any = _ChunkedTopDivergence if isinstance(teacher, TeacherTop) else _ChunkedDivergence
    result: tuple[Tensor, Tensor] = function.apply(
        hidden, weight, *(added or (None, None)), targets, teacher, first, valid, chunk, group
    )
    return result

"""Divergence to a teacher, exact or from its likeliest tokens: its value and gradient, token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop


class Factors(NamedTuple):
    """The gradient of each token's logits: p_j (p + log_p log p_j + log_q log q_j) + q q_j, and terms of
    single ones. p: the policy's probabilities, q: the teacher's. [tokens] each, None for 0.
    """

    p: Tensor
    log_p: Tensor | None = None
    log_q: Tensor | None = None
    q: Tensor | None = None
    likely: Tensor | None = None
    """[tokens, k]: further terms of the teacher's likeliest tokens."""


def likeliest_divergence(teacher: TeacherTop, own: Tensor) -> Tensor:
    """[tokens]: over the teacher's likeliest tokens and one outcome for all others. own [tokens, k]: the
    policy's log-probs of these tokens.
    """
    pairs = own, _rest(own), teacher.logps, _rest(teacher.logps)
    x, x_rest, y, y_rest = pairs if teacher.direction == "rkl" else pairs[2:] + pairs[:2]
    return ((x.exp() * (x - y)).sum(-1) + x_rest.exp() * (x_rest - y_rest)) * teacher.known


def divergence_factors(
    others: Factors, d: Tensor, teacher: TeacherRow | TeacherTop, divergence: Tensor, own: Tensor | None
) -> Factors:
    """Adds a divergence's gradient to that of other rows. d [tokens]: the loss's by the divergence; own: see
    ``likeliest_divergence``.
    """
    reverse = teacher.direction == "rkl"
    if isinstance(teacher, TeacherTop):
        assert own is not None
        d, logps, rest, teacher_rest = d * teacher.known, teacher.logps, _rest(own), _rest(teacher.logps)
        if reverse:  # d / d logit_j is p_j times these, for the likeliest tokens and for the others
            likely, unlikely = own - logps - divergence[:, None], rest - teacher_rest - divergence
        else:
            likely, unlikely = 1 - (logps - own).exp(), 1 - (teacher_rest - rest).exp()
        more = own.exp() * (likely - unlikely[:, None]) * d[:, None]
        return others._replace(p=others.p + unlikely * d, likely=more)
    if reverse:  # d KL / d logit_j = p_j (log p_j - log q_j - KL)
        log_p = d if others.log_p is None else others.log_p + d
        return others._replace(p=others.p - divergence * d, log_p=log_p, log_q=-d)
    return others._replace(p=others.p + d, q=-d)  # p_j - q_j


def _rest(logps: Tensor) -> Tensor:
    """Log of the probability that is left by those of the last dimension."""
    return torch.log1p(-logps.exp().sum(-1).clamp(max=1 - 1e-7))

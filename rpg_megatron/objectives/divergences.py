"""The four KL divergences between policy and anchor, as gradient coefficients and as penalties.

Per sampled token, with log-probs of policy p, sampling policy q and anchor r (all nats):
``w = p/q``, ``u = p/r``, ``v = r/q``, so ``w = u v``. Forward means KL(r || p), reverse KL(p || r); the
u-variants are the unnormalised KL, whose extra mass term has zero mean for normalised policies but changes
each sample. When the anchor is the old policy, ``v = 1`` and ``u = w``.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Divergence = Literal["fkl", "ufkl", "rkl", "urkl"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


def kl_component(divergence: Divergence, w: Tensor, log_u: Tensor, v: Tensor, beta: float) -> Tensor:
    """KL part C of the policy-gradient weight ``w A + C``, sign included; nothing is detached here.

    Shapes: w, log_u, v and the result: all the same. ``beta`` is the KL strength (dimensionless).
    Source: arXiv 2505.17508, propositions 3.2, 3.6, E.1, E.3 with v = 1; the importance weight v for an
    anchor that is not the sampling policy is derived in docs/objectives.md.
    """
    if divergence == "fkl":
        return beta * v
    if divergence == "ufkl":
        return beta * (v - w)
    if divergence == "rkl":
        return -beta * w * (log_u + 1)
    return -beta * w * log_u


def kl_penalty(divergence: Divergence, w: Tensor, log_u: Tensor, v: Tensor, beta: float) -> Tensor:
    """Per-token loss whose gradient, in expectation under q, is that of ``beta`` times the divergence.

    Shapes: as ``kl_component``. Gradients flow through ``w`` and ``log_u``; ``v`` carries none.
    Constants are chosen so that each unnormalised penalty is zero when the three policies agree.
    Source: arXiv 2505.17508, tables 1 and 4 with v = 1.
    """
    if divergence == "fkl":
        return -beta * v * log_u
    if divergence == "ufkl":
        return beta * (w - v * log_u - v)
    if divergence == "rkl":
        return beta * w * log_u
    return beta * (w * log_u - w + v)


def unnormalised_kl(w: Tensor, log_u: Tensor, v: Tensor) -> Tensor:
    """Importance-weighted estimate of the reverse unnormalised KL(p || r) of a token; never negative.

    Shapes: as ``kl_component``. ``w k3(r/p) = w log u - w + v``, in the form that cannot overflow
    before w does. Differentiable through ``w`` and ``log_u``. Source: arXiv 2505.17508, appendix D.
    """
    return w * log_u - w + v

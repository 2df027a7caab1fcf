"""The gated delta rule in torch, for trainers and engines on a CPU (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor

from rpg_megatron.config.model_shape import CHUNK


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide the last dimension by its length, in float32: x / sqrt(sum(x^2) + eps)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, tokens, value dim], and the states behind the tokens.

    q, k: normalised [n, heads, tokens, key dim]; v: like the outputs; g: logarithm of each token's decay, and
    beta: its rate [n, heads, tokens]; state: in front of the tokens [n, heads, key dim, value dim]. Within a
    chunk of tokens each update depends on the earlier ones, which is a triangular system (section 3.3).
    """
    outs = []
    for i in range(0, v.size(2), CHUNK):
        qs, ks, vs, sums, rate = (x[:, :, i : i + CHUNK] for x in (q, k, v, g[..., None], beta[..., None]))
        qs, sums = qs * k.size(-1) ** -0.5, sums.cumsum(2)
        # From a token to a later one. To an earlier one the difference is positive: its exp could overflow.
        decay = (sums - sums.mT).tril().exp().tril()
        system, right = (rate * ks @ ks.mT * decay).tril(-1), rate * (vs - sums.exp() * ks @ state)
        new = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outs.append(sums.exp() * qs @ state + (qs @ ks.mT * decay) @ new)
        last = sums[:, :, -1:]
        state = last.exp() * state + ((last - sums).exp() * ks).mT @ new
    return torch.cat(outs, 2), state

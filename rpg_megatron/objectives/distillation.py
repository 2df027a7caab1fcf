"""Distillation: divergences of the policy to a teacher, from sampled tokens or from full distributions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.clip import Clip
from rpg_megatron.objectives.interface import LossOutput
from rpg_megatron.objectives.rpg import rpg_loss

Direction = Literal["rkl", "fkl"]
"""rkl: KL(policy || teacher), fkl: KL(teacher || policy)."""


def sampled_divergence_loss(
    logp: Tensor,
    old_logp: Tensor,
    teacher_logp: Tensor,
    advantages: Tensor,
    *,
    divergence: Direction = "rkl",
    clip: Clip | None = None,
    sequences: Tensor | None = None,
) -> LossOutput:
    """Loss of each sampled token [n]: ``rpg_loss`` with the teacher as the anchor and beta 1.

    The divergence is the unnormalised one (urkl, ufkl): its gradient has the same expectation, because
    probabilities sum to 1, and a smaller variance.

    advantages [n]: of a reward, with its weight; 0 for distillation alone. sequences [n] (integer labels,
    tokens of a sequence in their order): the gradient of the divergence of whole sequences; each token's
    weight then has the log-ratios of all later tokens too, because it decides where they are sampled (rkl
    only). None: only the token's own, the divergence at the prefixes as they were sampled.

    At the old policy, the token form is unbiased for sum_t E[grad KL_t] with prefixes fixed, the sequence
    form for grad KL of the sequences. Source: docs/distillation.md; arXiv 2306.13649.
    """
    if sequences is not None:
        if divergence != "rkl":
            raise ValueError("the sequence form is for rkl only")
        advantages = advantages + _later_sums((teacher_logp - old_logp).detach(), sequences)
    return rpg_loss(
        logp,
        old_logp,
        advantages,
        divergence="urkl" if divergence == "rkl" else "ufkl",
        estimator="reinforce",
        beta=1.0,
        clip=clip,
        anchor_logp=teacher_logp,
    )


def _later_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """For each token, the sum of the values of the later tokens of its sequence, [n]. In float64 within."""
    wide = values.double()
    total = torch.cat([wide, wide.new_zeros(1)]).flip(0).cumsum(0).flip(0)  # of a token and all after it
    others = torch.zeros_like(sequences, dtype=torch.bool)  # tokens that are not the last of their sequence
    others[:-1] = sequences[1:] == sequences[:-1]
    places = torch.arange(len(sequences), device=sequences.device)
    # The end of each token's sequence. Not by nonzero, for which the host would wait on a GPU.
    end = places.masked_fill(others, len(sequences)).flip(0).cummin(0).values.flip(0)
    return (total[1:] - total[end + 1]).to(values.dtype)


def full_divergence_loss(
    logp: Tensor, divergence: Tensor, old_logp: Tensor, advantages: Tensor, *, clip: Clip | None = None
) -> LossOutput:
    """Loss of each token [n]: its exact divergence to the teacher, over the whole vocabulary, with gradient.

    advantages [n]: of a reward, with its weight: adds the clipped policy gradient of ``rpg_loss`` without KL.
    """
    reward = rpg_loss(logp, old_logp, advantages, beta=0.0, clip=clip)
    metrics = reward.metrics | {"kl": divergence.detach()}
    return LossOutput(reward.per_token + divergence, metrics)

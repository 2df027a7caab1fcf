"""The RPG losses have the gradient of the regularised objective, and the clip drops the right tokens.

Proved in float64: over a fully enumerated vocabulary, the expected gradient of each surrogate under the old
policy equals autograd's gradient of J = E_p[R] - beta KL written out, for each divergence, estimator and
anchor; the dual clip keeps and drops on both sides of each bound for both signs; group advantages in the
corner cases. Not covered here: training through Megatron (tests/distributed), baselines, sequence-level
ratios.
"""

from __future__ import annotations

import math

import pytest
import torch

from rpg_megatron.objectives import DIVERGENCES, Clip, group_advantages, rpg_loss

BETA = 0.3


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, old, anchor, reward = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.log_softmax(old, 0), torch.log_softmax(anchor, 0), reward


def objective(
    divergence: str, logp: torch.Tensor, anchor: torch.Tensor, reward: torch.Tensor
) -> torch.Tensor:
    p, r = logp.exp(), anchor.exp()
    kl = {
        "fkl": (r * (anchor - logp)).sum(),
        "ufkl": (r * (anchor - logp) + p - r).sum(),
        "rkl": (p * (logp - anchor)).sum(),
        "urkl": (p * (logp - anchor) + r - p).sum(),
    }[divergence]
    return (p * reward).sum() - BETA * kl


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("separate", [False, True], ids=["anchor-old", "anchor-separate"])
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_expected_gradient_is_exact(divergence: str, estimator: str, separate: bool, seed: int) -> None:
    logits, old, anchor, reward = policies(seed)
    anchor = anchor if separate else old
    (wanted,) = torch.autograd.grad(
        -objective(divergence, torch.log_softmax(logits, 0), anchor, reward), logits
    )
    out = rpg_loss(
        torch.log_softmax(logits, 0),
        old,
        reward,
        divergence=divergence,
        estimator=estimator,
        beta=BETA,
        clip=None,
        anchor_logp=anchor if separate else None,
    )
    (got,) = torch.autograd.grad((old.exp() * out.per_token).sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_wide_clip_changes_nothing(divergence: str) -> None:
    logits, old, _, reward = policies(3)
    wide = Clip(low=0.999999, high=1e6, c=1e7)
    gradients = []
    for clip in (None, wide):
        out = rpg_loss(torch.log_softmax(logits, 0), old, reward, divergence=divergence, beta=BETA, clip=clip)
        gradients.append(torch.autograd.grad(out.per_token.sum(), logits)[0])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "w", "kept"),
    [
        (1.0, 0.01, True),
        (1.0, 1.279, True),
        (1.0, 1.281, False),
        (1.0, 50.0, False),
        (-1.0, 0.799, False),
        (-1.0, 0.801, True),
        (-1.0, 9.99, True),
        (-1.0, 10.01, False),
    ],
)
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_dual_clip_bounds(advantage: float, w: float, kept: bool, estimator: str) -> None:
    old = torch.tensor([-2.0], dtype=torch.float64)
    logp = (old + math.log(w)).requires_grad_()
    out = rpg_loss(logp, old, torch.tensor([advantage], dtype=torch.float64), beta=0.0, estimator=estimator)
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert gradient.item() == pytest.approx(-w * advantage if kept else 0.0, rel=1e-12)
    hit = sum(out.metrics[k].item() for k in ("clip_high", "clip_low", "clip_c"))
    assert hit == (0 if kept else 1)


def test_the_clip_judges_the_regularised_advantage() -> None:
    # A = 0.1 alone is positive; with the KL part it is negative at w = 3, where only c bounds a negative
    # weight.
    old, w, beta = torch.tensor([-1.0], dtype=torch.float64), 3.0, 0.5
    logp = (old + math.log(w)).requires_grad_()
    out = rpg_loss(logp, old, torch.tensor([0.1], dtype=torch.float64), divergence="urkl", beta=beta)
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert gradient.item() == pytest.approx(-(w * 0.1 - beta * w * math.log(w)), rel=1e-12)


def test_truncation_saturates_but_never_drops() -> None:
    old = torch.full((2,), -1.0, dtype=torch.float64)
    logp = (old + torch.tensor([3.0, 0.1], dtype=torch.float64).log()).requires_grad_()
    out = rpg_loss(logp, old, torch.ones(2, dtype=torch.float64), beta=0.0, clip=Clip(kind="truncate"))
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([-1.28, -0.8], dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_named(bad: float) -> None:
    logp = torch.tensor([-1.0, bad, -2.0])
    with pytest.raises(ValueError, match=r"logp is (nan|-inf) at token 1"):
        rpg_loss(logp, torch.zeros(3), torch.zeros(3))


def test_huge_log_ratios_are_clamped_and_counted() -> None:
    out = rpg_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-100.0, -1.0]), torch.ones(2), clip=None)
    assert torch.isfinite(out.per_token).all()
    assert out.metrics["clamped"].tolist() == [1.0, 0.0]


def test_group_advantages() -> None:
    rewards = torch.tensor([1.0, -1.0, 0.3, 0.1, 0.1, 0.1, -1.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([5, 5, 2, 7, 7, 7, 9, 9, 9])
    got = group_advantages(rewards, groups)
    wanted = [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, -4 / 3, 2 / 3, 2 / 3]
    assert got.tolist() == pytest.approx(wanted, abs=1e-15)
    assert got[2:6].tolist() == [0.0] * 4  # exactly: a group of one, and a group of equals

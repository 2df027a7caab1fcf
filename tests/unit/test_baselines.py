"""Baselines, corrections, advantages and aggregation do what their papers and the released scripts do.

Proved in float64 over an enumerated vocabulary: which KL terms have the gradient of which divergence, and
which have not (GRPO's k3 without a ratio, the correction with a detached ratio, k1 as a loss); CISPO, GSPO
and the corrections against formulas written out here; advantages against hand-made numbers; aggregation cut
any way gives one gradient; a KL in the reward with group baselines. Not covered: training with them
(benchmarks), Megatron (tests/distributed).
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rpg_megatron.config.advantages import AdvantageSettings, AnyAdvantageSettings
from rpg_megatron.config.losses import ObjectiveSettings
from rpg_megatron.objectives import (
    Clip,
    ResponseTokens,
    aggregate,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    rollout_correction,
)
from rpg_megatron.objectives.advantages import response_kl

BETA = 0.3
KINDS = [s.model_fields["type"].annotation.__args__[0] for s in AdvantageSettings.__subclasses__()]


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, kind: str = "rpg", lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """The advantages that ``advantage.type`` names."""
    settings: Any = TypeAdapter(AnyAdvantageSettings).validate_python({"type": kind})
    lengths = torch.ones(len(rewards)) if lengths is None else lengths
    return torch.from_numpy(settings(rewards.numpy(), groups.numpy(), lengths.numpy()))


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, old, anchor = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.log_softmax(old, 0), torch.log_softmax(anchor, 0)


def reverse_kl_gradient(logits: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(logits, 0)
    return torch.autograd.grad(BETA * (logp.exp() * (logp - anchor)).sum(), logits)[0]


def kl_only(logits: torch.Tensor, old: torch.Tensor, anchor: torch.Tensor, **section: object) -> torch.Tensor:
    """Expected gradient of a loss of the settings under the old policy, with all advantages 0."""
    zeros = torch.zeros(7, dtype=torch.float64)
    loss: Any = TypeAdapter(ObjectiveSettings).validate_python({"beta": BETA, **section})
    tokens = ResponseTokens(old, anchor, old, zeros, torch.arange(7))
    out = loss(torch.log_softmax(logits, 0), tokens)
    return torch.autograd.grad((old.exp() * out.per_token).sum(), logits)[0]


@pytest.mark.parametrize("separate", [False, True], ids=["anchor-old", "anchor-separate"])
def test_grpo_kl_is_right_only_with_the_ratio(separate: bool) -> None:
    logits, old, anchor = policies(0)
    anchor = anchor if separate else old
    expected = reverse_kl_gradient(logits, anchor)
    corrected = kl_only(logits, old, anchor, type="grpo", corrected=True)
    torch.testing.assert_close(corrected, expected, rtol=0, atol=1e-12)
    published = kl_only(logits, old, anchor, type="grpo")
    assert (published - expected).abs().max() > 1e-2


def test_grpo_kl_on_policy_is_the_forward_one() -> None:
    logits, _, anchor = policies(1)
    old = torch.log_softmax(logits, 0).detach()
    logp = torch.log_softmax(logits, 0)
    (forward,) = torch.autograd.grad(BETA * (anchor.exp() * (anchor - logp)).sum(), logits)
    torch.testing.assert_close(kl_only(logits, old, anchor, type="grpo"), forward, rtol=0, atol=1e-12)


def test_a_detached_correction_is_the_forward_kl() -> None:
    logits, old, anchor = policies(2)
    logp = torch.log_softmax(logits, 0)
    log_u = logp - anchor
    detached = (logp - old).exp().detach() * (torch.exp(-log_u) - 1 + log_u)
    (gradient,) = torch.autograd.grad(BETA * (old.exp() * detached).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad(BETA * (anchor.exp() * (anchor - logp)).sum(), logits)
    torch.testing.assert_close(gradient, forward, rtol=0, atol=1e-12)
    assert (gradient - reverse_kl_gradient(logits, anchor)).abs().max() > 1e-2


def test_k1_as_a_loss_pushes_away() -> None:
    logits, old, _ = policies(3)
    logp = torch.log_softmax(logits, 0)
    (forward,) = torch.autograd.grad(BETA * (old.exp() * (old - logp)).sum(), logits)
    gradient = kl_only(logits, old, old, type="reinforce_plus_plus")
    torch.testing.assert_close(gradient, -forward, rtol=0, atol=1e-12)


def test_corrected_grpo_kl_is_urkl() -> None:
    # In expectation, not per sample: the differentiable URKL penalty differs by a term of zero mean.
    logits, old, anchor = policies(4)
    urkl = kl_only(logits, old, anchor, type="rpg", divergence="urkl", clip=None)
    torch.testing.assert_close(urkl, kl_only(logits, old, anchor, type="grpo", corrected=True))


@pytest.mark.parametrize(
    ("advantage", "w", "kept"),
    [
        (1.0, 1.27, True),
        (1.0, 1.29, False),
        (1.0, 0.1, True),
        (-1.0, 0.79, False),
        (-1.0, 9.9, True),
        (-1.0, 10.1, False),
    ],
)
def test_dual_clip(advantage: float, w: float, kept: bool) -> None:
    old = torch.tensor([-1.0], dtype=torch.float64)
    logp = (old + math.log(w)).requires_grad_()
    out = ppo_loss(logp, old, torch.tensor([advantage], dtype=torch.float64), clip=Clip(low=0.2, high=0.28))
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert gradient.item() == pytest.approx(-w * advantage if kept else 0.0, rel=1e-12)


def test_cispo_keeps_every_gradient_and_bounds_the_ratio() -> None:
    old = torch.full((3,), -1.0, dtype=torch.float64)
    logp = (old + torch.tensor([5.0, 1.1, 0.1], dtype=torch.float64).log()).requires_grad_()
    out = cispo_loss(logp, old, torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([-1.28, 1.1, -0.1], dtype=torch.float64))
    assert out.metrics["clip_high"].tolist() == [1, 0, 0]


def test_gspo_clips_whole_sequences() -> None:
    old = torch.zeros(5, dtype=torch.float64) - 1
    gaps = torch.tensor([0.03, -0.01, -0.02, 1.0, 2.0], dtype=torch.float64)  # means 0 and 1.5
    logp = (old + gaps).requires_grad_()
    sequences = torch.tensor([4, 4, 4, 2, 2])
    out = gspo_loss(logp, old, torch.tensor([1.0] * 3 + [0.5] * 2, dtype=torch.float64), sequences)
    total, count = aggregate(out.per_token, sequences, kind="sequence_mean")
    (gradient,) = torch.autograd.grad(total, logp)
    # First sequence: s = 1, each token gets A s / length. Second: s = e^1.5, beyond 1 + high, dropped.
    torch.testing.assert_close(gradient, torch.tensor([-1 / 3] * 3 + [0, 0], dtype=torch.float64))
    assert int(count) == 2
    assert total.item() == pytest.approx(-1.0 - 0.5 * (1 + 4e-4))


def test_corrections() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64) - 3
    old = behaviour + torch.tensor([1.0, 3.0, 0.2, 1.9], dtype=torch.float64).log()
    sequences = torch.tensor([0, 0, 1, 1])

    def factor(**settings: object) -> list[float]:
        return rollout_correction(old, behaviour, sequences, **settings).factor.tolist()

    assert factor(kind="truncate") == pytest.approx([1.0, 2.0, 0.2, 1.9])
    assert factor(kind="icepop") == pytest.approx([1.0, 0.0, 0.0, 1.9])
    assert factor(kind="truncate", level="sequence") == pytest.approx([2.0, 2.0, 0.38, 0.38])
    assert factor(kind="icepop", level="sequence") == pytest.approx([0.0] * 4)
    hit = rollout_correction(old, behaviour, sequences, kind="icepop").metrics["correction_hit"]
    assert hit.tolist() == [0, 1, 1, 0]
    # Geometric means: 3^(1/2) and (0.2 x 1.9)^(1/2).
    assert factor(kind="geometric", low=0.6) == pytest.approx([1.0] * 4)
    assert factor(kind="geometric", low=0.62) == pytest.approx([1.0, 1.0, 0.0, 0.0])
    assert factor(kind="geometric", low=0.6, high=1.7) == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert factor(kind="geometric", low=0.6, token_high=1.5) == pytest.approx([1.0, 1.5, 0.2, 1.5])
    with pytest.raises(ValueError, match="0 <= low < 1 < high"):
        factor(kind="icepop", low=1.5)


REWARDS = torch.tensor([1.0, -1.0, 0.3, 0.1, 0.1, 0.1, -1.0, 1.0, 1.0], dtype=torch.float64)
GROUPS = torch.tensor([5, 5, 2, 7, 7, 7, 9, 9, 9])
LENGTHS = torch.tensor([3, 1, 2, 5, 5, 5, 4, 1, 9])


def test_advantages_within_the_group() -> None:
    rpg = group_advantages(REWARDS, GROUPS)
    assert rpg.tolist() == pytest.approx([1.0, -1.0, 0.3, 0.0, 0.0, 0.0, -4 / 3, 2 / 3, 2 / 3], abs=1e-15)
    assert rpg[2].item() == REWARDS[2].item()  # a group of one has baseline 0
    assert rpg[3:6].tolist() == [0.0] * 3  # exactly: a group of equals
    loo = group_advantages(REWARDS, GROUPS, kind="leave_one_out")
    assert loo.tolist() == pytest.approx([2.0, -2.0, 0.3, 0.0, 0.0, 0.0, -2.0, 1.0, 1.0], abs=1e-15)
    grpo = group_advantages(REWARDS, GROUPS, kind="grpo")
    root = math.sqrt(2.0) + 1e-6, math.sqrt(4 / 3) + 1e-6
    assert grpo.tolist() == pytest.approx(
        [
            1 / root[0],
            -1 / root[0],
            0.3 / (1 + 1e-6),
            0,
            0,
            0,
            -4 / 3 / root[1],
            2 / 3 / root[1],
            2 / 3 / root[1],
        ],
        abs=1e-12,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_zero_advantage_iff_group_based(kind: str) -> None:
    advantages = group_advantages(REWARDS, GROUPS, kind=kind, lengths=torch.arange(1, len(REWARDS) + 1))[3:6]
    assert (advantages.tolist() == [0.0] * 3) == (kind in ("rpg", "grpo", "leave_one_out"))


def test_advantages_over_the_batch() -> None:
    mean = REWARDS.mean()
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, kind="batch_mean"), REWARDS - mean)
    for kind, values in (
        ("reinforce_plus_plus", REWARDS),
        ("reinforce_plus_plus_baseline", group_advantages(REWARDS, GROUPS)),
    ):
        tokens = values.repeat_interleave(LENGTHS)
        expected = (values - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
        torch.testing.assert_close(group_advantages(REWARDS, GROUPS, kind=kind, lengths=LENGTHS), expected)
    with pytest.raises(ValueError, match="must have the same shape"):
        group_advantages(REWARDS, GROUPS, kind="reinforce_plus_plus", lengths=LENGTHS[1:])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    kind=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_aggregation_does_not_depend_on_the_cut(lengths: list[int], cuts: list[int], kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    losses = [torch.randn(n, dtype=torch.float64, generator=generator) for n in lengths]
    expected = {
        "token_mean": torch.cat(losses).mean(),
        "sequence_mean": torch.stack([x.mean() for x in losses]).mean(),
        "constant": torch.stack([x.sum() / 16 for x in losses]).mean(),
    }[kind]
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for micro in range(4):  # some are empty
        chunk = [(i, x) for i, x in enumerate(losses) if cuts[i] == micro]
        values = torch.cat([x for _, x in chunk]) if chunk else torch.zeros(0, dtype=torch.float64)
        labels = (
            torch.cat([torch.full((len(x),), i) for i, x in chunk])
            if chunk
            else torch.zeros(0, dtype=torch.int64)
        )
        part, number = aggregate(values, labels, kind=kind, constant=16)
        counted = aggregate(values, labels, kind=kind, constant=16, sequence_count=len(losses))
        assert counted[0].equal(part)
        assert counted[1].equal(number)
        total, count = total + part, count + number
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize("kind", ["leave_one_out", "rpg"])
def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl(kind: str) -> None:
    """With a baseline from the group: exactly, over all groups of two responses; k3 in the reward has not."""
    logits, _, anchor = policies(4)
    rewards = torch.tensor([0.3, -1.0, 0.7, 0.0, 1.0, -0.2, 0.5], dtype=torch.float64)
    logp = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad(
        (logp.exp() * (rewards - BETA * (logp - anchor))).sum(), logits, retain_graph=True
    )
    share = {"leave_one_out": 1.0, "rpg": 0.5}[kind]  # a mean that includes the response itself: 1 - 1/2

    def gradient(estimator: Any) -> torch.Tensor:
        # A response of one token; log-probs as the trainer keeps them, before the update.
        kl = [
            response_kl(a, b, estimator) for a, b in zip(logp.detach().numpy(), anchor.numpy(), strict=True)
        ]
        total = torch.zeros_like(logits)
        for i, j in itertools.product(range(7), repeat=2):
            pair = torch.tensor([i, j])
            penalised = rewards[pair] - BETA * torch.tensor(kl, dtype=torch.float64)[pair]
            advantages = group_advantages(penalised, torch.zeros(2), kind=kind)
            chance = (logp[i] + logp[j]).exp().detach()
            total += torch.autograd.grad(
                chance * (advantages * logp[pair]).mean(), logits, retain_graph=True
            )[0]
        return total

    torch.testing.assert_close(gradient("k1"), share * expected, rtol=0, atol=1e-12)
    assert (gradient("k3") - share * expected).abs().max() > 1e-2


def test_the_kl_of_a_response_is_a_sum_over_its_tokens() -> None:
    old, anchor = np.array([-1.0, -2.0, -0.5], np.float32), np.array([-1.5, -1.0, -0.5], np.float32)
    assert response_kl(old, anchor, "k1") == pytest.approx(-0.5)
    ratios = np.array([0.5, -1.0, 0.0])
    assert response_kl(old, anchor, "k3") == pytest.approx((np.exp(-ratios) - 1 + ratios).sum())
    assert math.isfinite(response_kl(np.array([-500.0], np.float32), np.array([0.0], np.float32), "k3"))

"""The RPG losses have the gradient of the regularised objective, and the clip drops the right tokens.

Proved in float64. In expectation: over an enumerated vocabulary, the gradient of each surrogate under the old
policy equals autograd's gradient of J = E_p[R] - beta KL written out, for each divergence, estimator and
anchor; over an enumerated tree of two tokens likewise with the sequence-level ratio. Per sample: the weights
of the paper's table. The wrong ones are shown to be wrong. The dual clip keeps and drops on both sides of
each bound for both signs. Any finite input gives finite results, and what is not finite is named. Not covered
here: training through Megatron (tests/distributed), the baselines (test_baselines).
"""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.objectives import DIVERGENCES, Clip, rpg_loss
from rpg_megatron.objectives.clip import dual_bounds
from rpg_megatron.objectives.ratios import finite_at_end
from tools.draw_losses import draw

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
    (expected,) = torch.autograd.grad(
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
    (gradient,) = torch.autograd.grad((old.exp() * out.per_token).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_wide_clip_changes_nothing(divergence: str) -> None:
    logits, old, _, reward = policies(3)
    wide = Clip(low=0.999999, high=1e6, c=1e7)
    gradients = []
    for clip in (None, wide):
        out = rpg_loss(torch.log_softmax(logits, 0), old, reward, divergence=divergence, beta=BETA, clip=clip)
        gradients.append(torch.autograd.grad(out.per_token.sum(), logits)[0])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def per_sample_gradient(log_w: float, advantage: float, **settings: object) -> float:
    """D loss / d log p of one token whose old log-prob is -2."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    logp = (old + log_w).requires_grad_()
    out = rpg_loss(logp, old, torch.tensor([advantage], dtype=torch.float64), **settings)
    return torch.autograd.grad(out.per_token.sum(), logp)[0].item()


def component(divergence: str, w: float) -> float:
    """The KL part of the weight, as the table of the paper has it, for an anchor that is the old policy."""
    return {
        "fkl": BETA,
        "ufkl": -BETA * (w - 1),
        "rkl": -BETA * w * (math.log(w) + 1),
        "urkl": -BETA * w * math.log(w),
    }[divergence]


@pytest.mark.parametrize("log_w", [-30.0, -1.0, 0.0, 0.3, 5.0, 30.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_per_sample_gradients_are_those_of_the_table(divergence: str, log_w: float) -> None:
    # Expectations cannot tell FKL from UFKL nor RKL from URKL; single samples can.
    w, advantage = math.exp(log_w), 0.7
    reinforce = per_sample_gradient(log_w, advantage, divergence=divergence, beta=BETA, clip=None)
    assert reinforce == pytest.approx(-(w * advantage + component(divergence, w)), rel=1e-12, abs=1e-12)
    differentiable = per_sample_gradient(
        log_w, advantage, divergence=divergence, beta=BETA, clip=None, estimator="differentiable"
    )
    penalty = {
        "fkl": -BETA,
        "ufkl": BETA * (w - 1),
        "rkl": BETA * w * (log_w + 1),
        "urkl": BETA * w * log_w,
    }[divergence]
    assert differentiable == pytest.approx(-w * advantage + penalty, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_kl_weight_at_the_old_policy(estimator: str) -> None:
    at_one = {
        d: -per_sample_gradient(0.0, 0.0, divergence=d, beta=BETA, clip=None, estimator=estimator)
        for d in DIVERGENCES
    }
    assert at_one == {"fkl": BETA, "ufkl": 0.0, "rkl": -BETA, "urkl": 0.0}


@pytest.mark.parametrize(("normalised", "unnormalised"), [("fkl", "ufkl"), ("rkl", "urkl")])
def test_normalised_and_unnormalised_agree_in_expectation_only(normalised: str, unnormalised: str) -> None:
    logits, old, _, reward = policies(5)
    single, expected = [], []
    for divergence in (normalised, unnormalised):
        logp = torch.log_softmax(logits, 0)
        out = rpg_loss(logp, old, reward, divergence=divergence, beta=BETA, clip=None)
        single.append(torch.autograd.grad(out.per_token.sum(), logp, retain_graph=True)[0])
        expected.append(torch.autograd.grad((old.exp() * out.per_token).sum(), logits)[0])
    torch.testing.assert_close(*expected, rtol=0, atol=1e-12)
    assert (single[0] - single[1]).abs().min() > 1e-2


@pytest.mark.parametrize("clip", [Clip(), Clip(kind="truncate"), None])
def test_known_sequences_give_the_same_bits(clip: Clip | None) -> None:
    """Sequence numbers, some of them without tokens, or any labels, for which a GPU synchronises."""
    generator = torch.Generator().manual_seed(3)
    logp, old, advantages = torch.randn(3, 12, generator=generator)
    numbers = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3, 6, 6, 6])
    losses = [
        rpg_loss(logp, old, advantages, estimator="differentiable", clip=clip, sequences=s, sequence_count=n)
        for s, n in ((numbers, 8), (numbers, None), (10 * numbers - 7, None))
    ]
    for loss in losses[1:]:
        assert losses[0].per_token.equal(loss.per_token)


def test_k3_is_the_unnormalised_kl() -> None:
    # Unnormalised on purpose: with normalised policies the mass term could be missing unseen.
    generator = torch.Generator().manual_seed(2)
    p, q = torch.rand(2, 9, dtype=torch.float64, generator=generator) + 0.1

    def k3(y: torch.Tensor) -> torch.Tensor:
        return y - 1 - y.log()

    def unnormalised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log() + b - a).sum()

    torch.testing.assert_close((q * k3(p / q)).sum(), unnormalised(q, p))
    torch.testing.assert_close((p * k3(q / p)).sum(), unnormalised(p, q))
    torch.testing.assert_close((q * (p / q) * k3(q / p)).sum(), unnormalised(p, q))


def expected_gradient(loss: torch.Tensor, old: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((old.exp() * loss).sum(), logits)[0]


@pytest.mark.parametrize("divergence", ["fkl", "ufkl"])
def test_algorithm_1_read_literally_is_wrong(divergence: str) -> None:
    # -w A_reg with the gradient through A_reg as well: for the forward divergences the KL gradient is lost.
    logits, old, _, reward = policies(4)
    logp = torch.log_softmax(logits, 0)
    w = (logp - old).exp()
    regularised = reward + (BETA / w if divergence == "fkl" else -BETA * (1 - 1 / w))
    (expected,) = torch.autograd.grad(
        -objective(divergence, torch.log_softmax(logits, 0), old, reward), logits
    )
    literal = expected_gradient(-w * regularised, old, logits)
    assert (literal - expected).abs().max() > 1e-2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("bound", [0.8, 1.28, 10.0])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"estimator": "differentiable", "kl_placement": "folded"}],
    ids=["reinforce", "differentiable"],
)
def test_dual_clip_at_each_bound(
    divergence: str, advantage: float, bound: float, side: int, settings: dict
) -> None:
    # Just below and just above (at the bound: next test); the regularised advantage keeps the sign of A,
    # since beta is small here.
    beta, log_w = 1e-3, math.log(bound) + side * 1e-9
    w = math.exp(log_w)
    kept = w < 1.28 if advantage > 0 else 0.8 < w < 10.0
    gradient = per_sample_gradient(
        log_w, advantage, divergence=divergence, beta=beta, clip=Clip(), **settings
    )
    expected = -(w * advantage + component(divergence, w) * beta / BETA) if kept else 0.0
    assert gradient == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("weight", "w", "dropped"), [(1.0, 1.28, 1), (-1.0, 0.8, 1), (-1.0, 10.0, 1), (1.0, 0.8, 0)]
)
def test_a_token_exactly_at_a_bound_is_dropped(weight: float, w: float, dropped: int) -> None:
    bounds = dual_bounds(
        torch.tensor([weight], dtype=torch.float64), torch.tensor([w], dtype=torch.float64), Clip()
    )
    assert sum(int(b) for b in bounds) == dropped


@given(
    log_w=st.lists(st.floats(-30, 30), min_size=0, max_size=20),
    seed=st.integers(0, 1000),
    divergence=st.sampled_from(DIVERGENCES),
    estimator=st.sampled_from(["reinforce", "differentiable"]),
    placement=st.sampled_from([None, "folded", "additive"]),
    clip=st.sampled_from([None, Clip(), Clip(kind="truncate"), Clip(low=0.1, high=0.1, c=2.0)]),
    separate=st.booleans(),
)
def test_any_input_gives_finite_losses_and_gradients(
    log_w: list[float],
    seed: int,
    divergence: str,
    estimator: str,
    placement: str | None,
    clip: Clip | None,
    separate: bool,
) -> None:
    random = torch.Generator().manual_seed(seed)
    n = len(log_w)
    old, anchor = -5 * torch.rand(2, n, generator=random)
    logp = (old + torch.tensor(log_w)).requires_grad_()
    out = rpg_loss(
        logp,
        old,
        torch.randn(n, generator=random),
        divergence=divergence,
        estimator=estimator,
        beta=0.1,
        clip=clip,
        kl_placement=placement,
        anchor_logp=anchor if separate else None,
    )
    (gradient,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert out.per_token.shape == gradient.shape == (n,)
    assert torch.isfinite(out.per_token).all()
    assert torch.isfinite(gradient).all()
    assert all(m.shape == (n,) and not m.requires_grad for m in out.metrics.values())


@pytest.mark.parametrize("name", ["logp", "old_logp", "advantages", "anchor_logp"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_what_is_not_finite_is_named(name: str, bad: float) -> None:
    inputs = {k: torch.zeros(2, 3) for k in ("logp", "old_logp", "advantages", "anchor_logp")}
    inputs[name][1, 2] = bad
    with pytest.raises(ValueError, match=rf"^{name} is (nan|-?inf) at token \(1, 2\)"):
        rpg_loss(**inputs)


def test_what_is_not_finite_is_named_at_the_end_of_an_update() -> None:
    """All micro-batches of an update are computed first; the first wrong one is named, with its token."""
    good, bad, worse = (torch.zeros(4) for _ in range(3))
    bad[2], worse[0] = float("nan"), float("inf")
    computed = []
    with pytest.raises(ValueError, match=r"^old_logp is nan at token 2"), finite_at_end():
        computed += [rpg_loss(good, old, good) for old in (good, bad, worse)]
    assert len(computed) == 3
    with finite_at_end():
        rpg_loss(good, good, good)
    with pytest.raises(ValueError, match=r"^logp is inf at token 0"):  # outside of a block at once
        rpg_loss(worse, good, good)


def sequence_tree(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tokens of three values each: logits [1 + 3, 3], old log-probs likewise, a reward of each pair."""
    generator = torch.Generator().manual_seed(seed)
    logits, old = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    return (
        logits.requires_grad_(),
        torch.log_softmax(old, -1),
        torch.randn(3, 3, dtype=torch.float64, generator=generator),
    )


def tree_logprobs(table: torch.Tensor) -> torch.Tensor:
    """Log-probs of the two tokens of each of the nine sequences: [9, 2]."""
    first, second = table[0][:, None].expand(3, 3), table[1:]
    return torch.stack([first, second], -1).reshape(9, 2)


@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sequence_ratio_is_exact_and_token_ratio_as_documented(divergence: str, estimator: str) -> None:
    logits, old_table, reward = sequence_tree(1)
    old = tree_logprobs(old_table)

    def exact(with_reward: bool) -> torch.Tensor:
        logp = tree_logprobs(torch.log_softmax(logits, -1)).sum(-1)
        value = objective(divergence, logp, old.sum(-1), reward.reshape(9) * with_reward)
        return torch.autograd.grad(-value, logits)[0]

    def surrogate(with_reward: bool, by_sequence: bool) -> torch.Tensor:
        logp = tree_logprobs(torch.log_softmax(logits, -1))
        out = rpg_loss(
            logp.reshape(18),
            old.reshape(18),
            (reward.reshape(9) * with_reward).repeat_interleave(2),
            divergence=divergence,
            estimator=estimator,
            beta=BETA,
            clip=None,
            sequences=torch.arange(9).repeat_interleave(2) if by_sequence else None,
        )
        return torch.autograd.grad((old.sum(-1).exp() * out.per_token.view(9, 2).sum(-1)).sum(), logits)[0]

    torch.testing.assert_close(surrogate(True, True), exact(True), rtol=0, atol=1e-12)
    # Token by token, off-policy: the forward KL gradients are still exact, the reverse ones are not.
    gap = (surrogate(False, False) - exact(False)).abs().max()
    assert gap < 1e-12 if divergence in ("fkl", "ufkl") else gap > 1e-2


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


def test_huge_log_ratios_are_clamped_and_counted() -> None:
    out = rpg_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-100.0, -1.0]), torch.ones(2), clip=None)
    assert torch.isfinite(out.per_token).all()
    assert out.metrics["clamped"].tolist() == [1.0, 0.0]


def test_the_picture_is_that_of_the_losses() -> None:
    file = Path(__file__).parents[2] / "docs" / "losses.svg"
    assert file.read_text(encoding="utf-8") == draw(), "python tools/draw_losses.py > docs/losses.svg"

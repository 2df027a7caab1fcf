"""Every loss that a config can name is the function of that name, with the config's numbers.

For each block: the built loss equals a direct call of the public function with those arguments, and a changed
setting changes the result, so that no setting is a no-op. Also here: the rules that move a held anchor, on
plain tensors. Not covered: the numbers themselves (test_objectives, test_baselines), swapping in Megatron
(tests/distributed).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rpg_megatron.config import Settings
from rpg_megatron.config.objective import AnchorSettings
from rpg_megatron.objectives import (
    Clip,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    rollout_correction,
    rpg_loss,
)
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.microbatch import ResponseTokens
from rpg_megatron.training.loss import build_aggregator, build_loss


def tokens() -> tuple[torch.Tensor, ResponseTokens]:
    generator = torch.Generator().manual_seed(0)
    n = 24
    old = -3 * torch.rand(n, generator=generator)
    return old + 0.4 * torch.randn(n, generator=generator), ResponseTokens(
        old=old,
        anchor=old + 0.5 * torch.randn(n, generator=generator),
        behaviour=old + 0.5 * torch.randn(n, generator=generator),
        advantages=torch.randn(n, generator=generator),
        sequences=torch.arange(n) // 5,
    )


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


T = tokens()[1]
CLIP = {"kind": "dual", "low": 0.1, "high": 0.3, "c": 3.0}
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("default", {}, partial(rpg_loss, divergence="urkl", beta=1e-4)),
    (
        "rpg",
        {"type": "rpg", "divergence": "fkl", "estimator": "differentiable", "beta": 0.2, "clip": CLIP},
        partial(rpg_loss, divergence="fkl", estimator="differentiable", beta=0.2, clip=Clip(**CLIP)),
    ),
    (
        "rpg-folded",
        {
            "divergence": "rkl",
            "estimator": "differentiable",
            "beta": 0.2,
            "kl_placement": "folded",
            "clip": None,
        },
        partial(
            rpg_loss, divergence="rkl", estimator="differentiable", beta=0.2, kl_placement="folded", clip=None
        ),
    ),
    ("rpg-sequence", {"ratio": "sequence", "beta": 0.2}, partial(rpg_loss, beta=0.2, sequences=T.sequences)),
    (
        "grpo",
        {"type": "grpo", "beta": 0.3, "clip": CLIP},
        partial(ppo_loss, kl="k3", beta=0.3, clip=Clip(**CLIP)),
    ),
    (
        "grpo-corrected",
        {"type": "grpo", "corrected": True},
        partial(ppo_loss, kl="k3_weighted", beta=1e-3, clip=Clip(low=0.2, high=0.2)),
    ),
    ("dapo", {"type": "dapo", "clip": CLIP}, partial(ppo_loss, clip=Clip(**CLIP))),
    ("dapo-default", {"type": "dapo"}, partial(ppo_loss, clip=Clip(low=0.2, high=0.28))),
    ("ppo", {"type": "ppo", "clip": {"low": 0.05}}, partial(ppo_loss, clip=Clip(low=0.05))),
    (
        "reinforce++",
        {"type": "reinforce_plus_plus", "beta": 0.3, "clip": CLIP},
        partial(ppo_loss, kl="k1", beta=0.3, clip=Clip(**CLIP)),
    ),
    ("cispo", {"type": "cispo", "low": 0.5, "high": 0.1}, partial(cispo_loss, low=0.5, high=0.1)),
    (
        "gspo",
        {"type": "gspo", "low": 0.02, "high": 0.03},
        partial(gspo_loss, sequences=T.sequences, low=0.02, high=0.03),
    ),
]


def knows_an_anchor(block: dict[str, Any]) -> bool:
    return block.get("type", "rpg") in ("rpg", "grpo", "reinforce_plus_plus")


def settings_for(block: dict[str, Any], anchor: str) -> Settings:
    kind = block.get("type", "rpg")
    aggregation = {"type": "sequence_mean" if kind == "gspo" else "token_mean"}
    advantage = {"type": kind if kind in ("rpg", "reinforce_plus_plus") else "grpo"}
    return settings(objective=block, anchor={"type": anchor}, aggregation=aggregation, advantage=advantage)


@pytest.mark.parametrize(("name", "block", "direct"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("anchor", ["old", "fixed"])
def test_a_block_is_its_function(name: str, block: dict[str, Any], direct: Any, anchor: str) -> None:
    logp, t = tokens()
    if anchor == "fixed" and not knows_an_anchor(block):
        with pytest.raises(ValueError, match="has no KL term"):
            settings_for(block, anchor)
        return
    if anchor == "old" and block.get("type") == "grpo":  # its KL is to a reference model
        with pytest.raises(ValueError, match=r"set anchor\.type to fixed"):
            settings_for(block, anchor)
        return
    loss = build_loss(settings_for(block, anchor))(logp, t).per_token
    extra = {"anchor_logp": t.anchor} if anchor == "fixed" else {}
    torch.testing.assert_close(loss, direct(logp, t.old, t.advantages, **extra).per_token, rtol=0, atol=0)


def test_blocks_differ() -> None:
    logp, t = tokens()
    anchors = ["fixed" if block.get("type") == "grpo" else "old" for _, block, _ in CASES]
    losses = [
        build_loss(settings_for(block, anchor))(logp, t).per_token
        for (_, block, _), anchor in zip(CASES, anchors, strict=True)
    ]
    for i, loss in enumerate(losses):
        for j, earlier in enumerate(losses[:i]):
            assert not torch.equal(loss, earlier), (CASES[i][0], CASES[j][0])


@pytest.mark.parametrize("kind", ["truncate", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_multiplies_the_loss(kind: str, level: str) -> None:
    logp, t = tokens()
    block = {"type": kind, "level": level, "high": 1.4} | ({"low": 0.7} if kind == "icepop" else {})
    out = build_loss(settings(correction=block))(logp, t)
    plain = build_loss(settings())(logp, t).per_token
    correction = rollout_correction(
        t.old, t.behaviour, t.sequences, kind=kind, level=level, low=0.7, high=1.4
    )
    torch.testing.assert_close(out.per_token, plain * correction.factor)
    assert out.metrics["correction_hit"].sum() > 0


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, 24),
        ({"type": "sequence_mean"}, 5),
        ({"type": "constant"}, 5),
    ],
)
def test_aggregation(block: dict[str, Any], expected: int) -> None:
    _, t = tokens()
    total, count = build_aggregator(settings(aggregation=block))(torch.ones(24), t)
    assert int(count) == expected
    sums = {"token_mean": 24.0, "sequence_mean": 5.0, "constant": 24 / 2048}
    assert float(total) == pytest.approx(sums[block.get("type", "token_mean")])


REJECTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"type": "icepop", "low": 0.7, "high": 1.4},
    "sequences": {"type": "icepop", "level": "sequence", "low": 0.3, "high": 3.0},
    "geometric": {"type": "geometric", "low": 0.9, "high": 1.2},
    "geometric, weighted": {"type": "geometric", "low": 0.9, "high": 1.2, "token_high": 1.3},
}


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("rejection", REJECTIONS)
@pytest.mark.parametrize("cut", [24, 10, 5])
def test_rejected_tokens_leave_the_denominator(kind: str, rejection: str, cut: int) -> None:
    """Loss and gradient over micro-batches of any size, against a loop over the kept tokens; float64."""
    _, t = tokens()
    t = ResponseTokens(t.old.double(), t.anchor.double(), t.behaviour.double(), t.advantages, t.sequences)
    logp = (t.old + 0.1).requires_grad_()
    block = REJECTIONS[rejection]
    config = settings(
        objective={"type": "cispo"},
        advantage={"type": "grpo"},
        aggregation={"type": kind},
        rollout={"max_response_tokens": 7},
        correction=block | {"denominator": "kept"},
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, 24, cut):
        part = slice(start, start + cut)
        fields = {k: getattr(t, k)[part] for k in ("old", "anchor", "behaviour", "advantages", "sequences")}
        microbatch = ResponseTokens(**fields)
        loss_sum, number = build_aggregator(config)(
            build_loss(config)(logp[part], microbatch).per_token, microbatch
        )
        total, count = total + loss_sum, count + int(number)
    (gradient,) = torch.autograd.grad(total / count, logp)

    plain = build_loss(config.model_copy(update={"correction": None}))(logp, t).per_token
    kept: dict[int, list[torch.Tensor]] = {}
    low, high = block["low"], block["high"]
    for i, label in enumerate(t.sequences.tolist()):
        gaps = (t.old - t.behaviour)[t.sequences == label]
        ratio = float((t.old - t.behaviour)[i].exp())
        judged = {"tokens": ratio, "sequences": float(gaps.sum().exp())}.get(
            rejection, float(gaps.mean().exp())
        )
        factor = {"geometric": 1.0, "geometric, weighted": min(ratio, 1.3)}.get(rejection, judged)
        if low <= judged <= high:
            kept.setdefault(label, []).append(plain[i] * factor)
    assert 0 < sum(map(len, kept.values())) < 24
    sums = [torch.stack(each).sum() for each in kept.values()]
    if kind == "token_mean":
        expected = torch.stack(sums).sum() / sum(map(len, kept.values()))
    elif kind == "sequence_mean":
        expected = torch.stack([torch.stack(each).mean() for each in kept.values()]).mean()
    else:
        expected = torch.stack(sums).mean() / 7
    torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
    (reference,) = torch.autograd.grad(expected, logp)
    torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-15)


def test_rejected_tokens_take_their_entropy_with_them() -> None:
    logp, t = tokens()
    entropy = torch.linspace(0.1, 2.0, len(logp))
    config = settings(
        objective={"entropy_bonus": 0.3}, correction=REJECTIONS["tokens"] | {"denominator": "kept"}
    )
    out = build_loss(config)(logp, replace(t, entropy=entropy)).per_token
    kept = rollout_correction(t.old, t.behaviour, t.sequences, kind="icepop", low=0.7, high=1.4).kept
    total, count = build_aggregator(config)(out, t)
    assert 0 < int(count) == int(kept.sum()) < 24
    torch.testing.assert_close(total, out[kept].sum())
    empty = build_aggregator(config)(out, replace(t, behaviour=t.old + 5))
    assert [float(x) for x in empty] == [0, 0]


def held(**block: Any) -> tuple[HeldAnchor, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.zeros(3))
    return HeldAnchor([weight], AnchorSettings(**block)), weight


def read(anchor: HeldAnchor, weight: torch.nn.Parameter) -> list[float]:
    before = weight.detach().clone()
    with anchor.swapped_in():
        value = weight.tolist()
    assert torch.equal(weight, before)
    return value


@torch.no_grad()
def test_a_fixed_anchor_never_moves() -> None:
    anchor, weight = held(type="fixed")
    for step in range(1, 5):
        weight.fill_(float(step))
        assert not anchor.after_step(16, kl=100.0)
        assert read(anchor, weight) == [0.0] * 3


@torch.no_grad()
def test_an_anchor_moves_after_so_many_updates() -> None:
    anchor, weight = held(type="every", updates=5)
    moved = []
    for step in range(1, 7):
        weight.fill_(float(step))
        moved.append(anchor.after_step(2, kl=0.0))
        assert read(anchor, weight) == [3.0 if 3 <= step < 6 else 6.0 if step == 6 else 0.0] * 3
    assert moved == [False, False, True, False, False, True]  # after 6 updates, and again after 6 more


@torch.no_grad()
def test_an_anchor_moves_when_the_kl_has_grown() -> None:
    anchor, weight = held(type="kl_trigger", kappa=0.1)
    moved = []
    for step, kl in enumerate([0.05, 0.1, 0.7, 0.02, 0.9], 1):
        weight.fill_(float(step))
        moved.append(anchor.after_step(1, kl=kl))
    # Averages: 0.05, 0.055, 0.1195 (moved, starts anew), 0.02, 0.108 (moved).
    assert moved == [False, False, True, False, True]
    assert anchor.refreshes == 2
    assert read(anchor, weight) == [5.0] * 3


def test_the_entropy_bonus_is_outside_the_correction() -> None:
    logp, t = tokens()
    entropy = torch.linspace(0.1, 2.0, len(logp))
    corrected = {"correction": {"type": "icepop"}}
    plain = build_loss(settings(**corrected))(logp, t)
    output = build_loss(settings(objective={"entropy_bonus": 0.3}, **corrected))(
        logp, replace(t, entropy=entropy)
    )
    torch.testing.assert_close(output.per_token, plain.per_token - 0.3 * entropy, rtol=0, atol=0)
    torch.testing.assert_close(output.metrics.pop("entropy_bonus"), 0.3 * entropy, rtol=0, atol=0)
    assert output.metrics.keys() == plain.metrics.keys()

"""The gradients of distillation are those of the divergences that they name, by enumeration in float64.

Why: a sampled divergence whose score-function term is left out, or counted twice, still lowers the loss; the
policy ends elsewhere. Proved on a policy over all 4**3 sequences of a small vocabulary, whose next token
depends on the whole prefix: the expected gradient of the token form is that of the divergences at fixed
prefixes, in both directions; that of the sequence form is the gradient of the divergence of sequences; at the
teacher both are zero; with the advantage of a reward, the policy gradient is added. RPG with the teacher as
its anchor is the same loss. The exact divergence over the vocabulary has the gradients of autograd, in
float64 and through the chunked kernel in float32, whatever the chunk.
Not covered here: layouts (tests/distributed/test_teachers), runs (tests/integration).
"""

import itertools
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rpg_megatron.objectives import full_divergence_loss, rpg_loss, sampled_divergence_loss
from rpg_megatron.policy.logprobs import Head, token_logprobs
from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop
from rpg_megatron.policy.policy import UpdateStats
from rpg_megatron.training.trainer import Trainer
from tests.support.allocations import AllocationWatch

V, T = 4, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))


def tables(seed: int) -> dict[tuple[int, ...], Tensor]:
    """Logits of the next token after each prefix."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(T) for p in itertools.product(range(V), repeat=n)]
    return {p: torch.randn(V, generator=generator, dtype=torch.float64) for p in prefixes}


def logps(table: dict[tuple[int, ...], Tensor]) -> Tensor:
    """Log-prob of each token of each sequence, [sequences, T]."""
    rows = [[table[s[:t]].log_softmax(-1)[s[t]] for t in range(T)] for s in SEQUENCES]
    return torch.stack([torch.stack(row) for row in rows])


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two rows of logits."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(value: Tensor, table: dict[tuple[int, ...], Tensor]) -> Tensor:
    return torch.cat(torch.autograd.grad(value, list(table.values()), materialize_grads=True))


@pytest.fixture
def policy() -> dict[tuple[int, ...], Tensor]:
    return {prefix: logits.requires_grad_() for prefix, logits in tables(1).items()}


TEACHER = tables(2)
REWARDS = torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def expected_loss(policy: Any, form: str, divergence: str, reward: float = 0.0) -> Tensor:
    """The mean of a sampled form over all sequences, each as often as the policy samples it."""
    own, others = logps(policy), logps(TEACHER)
    weight = own.detach().sum(1).exp()
    total = own.new_zeros(())
    for i in range(len(SEQUENCES)):
        out = sampled_divergence_loss(
            own[i],
            own[i].detach(),
            others[i],
            reward * REWARDS[i].expand(T),
            divergence=divergence,  # type: ignore[arg-type]
            sequences=torch.zeros(T, dtype=torch.long) if form == "sequence" else None,
        )
        total = total + weight[i] * out.per_token.sum()
    return total


def at_fixed_prefixes(policy: Any, divergence: str) -> Tensor:
    """Divergences of the next tokens, after prefixes that the policy samples, held fixed."""
    total = torch.zeros((), dtype=torch.float64)
    for prefix, logits in policy.items():
        steps = [policy[prefix[:t]].detach().log_softmax(-1)[prefix[t]] for t in range(len(prefix))]
        probability = torch.stack([*steps, torch.zeros((), dtype=torch.float64)]).sum().exp()
        pair = (logits, TEACHER[prefix]) if divergence == "rkl" else (TEACHER[prefix], logits)
        total = total + probability * kl(*pair)
    return total


def of_sequences(policy: Any) -> Tensor:
    """KL(policy || teacher) of whole sequences."""
    own, others = logps(policy).sum(1), logps(TEACHER).sum(1)
    return (own.exp() * (own - others)).sum()


@pytest.mark.parametrize("divergence", ["rkl", "fkl"])
def test_the_token_form(policy: Any, divergence: str) -> None:
    actual = gradient(expected_loss(policy, "token", divergence), policy)
    torch.testing.assert_close(actual, gradient(at_fixed_prefixes(policy, divergence), policy))


def test_the_sequence_form_has_the_score_function_term(policy: Any) -> None:
    actual = gradient(expected_loss(policy, "sequence", "rkl"), policy)
    expected = gradient(of_sequences(policy), policy)
    torch.testing.assert_close(actual, expected)
    token = gradient(expected_loss(policy, "token", "rkl"), policy)
    assert (token - expected).abs().max() > 0.01, "the token form is another gradient"
    # The last token decides no later one.
    last = slice(-(V**T), None)
    torch.testing.assert_close(token[last], expected[last])


def test_a_reward_is_added(policy: Any) -> None:
    actual = gradient(expected_loss(policy, "sequence", "rkl", reward=0.7), policy)
    objective = of_sequences(policy) - 0.7 * (logps(policy).sum(1).exp() * REWARDS).sum()
    torch.testing.assert_close(actual, gradient(objective, policy))


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_nothing_is_left_to_learn_at_the_teacher(form: str) -> None:
    policy = {prefix: logits.clone().requires_grad_() for prefix, logits in TEACHER.items()}
    divergences = ("rkl", "fkl") if form == "token" else ("rkl",)
    for divergence in divergences:
        left = gradient(expected_loss(policy, form, divergence), policy)
        assert left.abs().max() < 1e-12, divergence


def test_it_is_rpg_with_the_teacher_as_anchor(policy: Any) -> None:
    """V = r / q of docs/objectives.md, where r is the anchor's probability: the teacher's."""
    own, others = logps(policy).flatten(), logps(TEACHER).flatten()
    old, advantages = own.detach() + 0.1 * torch.randn(len(own), dtype=torch.float64), torch.zeros_like(own)
    for divergence, unnormalised in (("rkl", "urkl"), ("fkl", "ufkl")):
        ours = sampled_divergence_loss(own, old, others, advantages, divergence=divergence)  # type: ignore[arg-type]
        rpg = rpg_loss(
            own,
            old,
            advantages,
            divergence=unnormalised,  # type: ignore[arg-type]
            beta=1.0,
            clip=None,
            anchor_logp=others,
        )
        assert torch.equal(ours.per_token, rpg.per_token)


def variance(policy: Any, loss: Any) -> float:
    """Of the gradient from one sampled sequence, summed over parameters. loss: of a sequence's index."""
    weight = logps(policy).detach().sum(1).exp()
    gradients = torch.stack([gradient(loss(i), policy) for i in range(len(SEQUENCES))])
    mean = (weight[:, None] * gradients).sum(0)
    return float((weight[:, None] * (gradients - mean) ** 2).sum())


def test_variances_are_in_the_order_of_the_page(policy: Any) -> None:
    """docs/evidence/distillation.md: full < token, unnormalised < token, normalised < sequence."""
    others = logps(TEACHER)

    def sampled(divergence: str, form: str = "token") -> Any:
        def loss(i: int) -> Tensor:
            own, labels = logps(policy)[i], torch.zeros(T, dtype=torch.long)
            if divergence in ("rkl", "fkl"):
                own_loss = sampled_divergence_loss(
                    own, own.detach(), others[i], torch.zeros(T).double(), divergence=divergence,  # type: ignore[arg-type]
                    sequences=labels if form == "sequence" else None,
                )  # fmt: skip
                return own_loss.per_token.sum()
            zeros = torch.zeros(T).double()
            plain = rpg_loss(own, own.detach(), zeros, divergence=divergence.removeprefix("plain "), beta=1.0,  # type: ignore[arg-type]
                             clip=None, anchor_logp=others[i])  # fmt: skip
            return plain.per_token.sum()

        return loss

    def full(direction: str) -> Any:
        def loss(i: int) -> Tensor:
            prefixes = [SEQUENCES[i][:t] for t in range(T)]
            pairs = [
                (policy[p], TEACHER[p]) if direction == "rkl" else (TEACHER[p], policy[p]) for p in prefixes
            ]
            return torch.stack([kl(*pair) for pair in pairs]).sum()

        return loss

    for direction in ("rkl", "fkl"):
        exact, token, plain = (
            variance(policy, each)
            for each in (full(direction), sampled(direction), sampled(f"plain {direction}"))
        )
        print(f"{direction}: full {exact:.3f}, token {token:.3f}, normalised {plain:.3f}")
        assert exact < token < plain
    assert variance(policy, sampled("rkl", "sequence")) > variance(policy, sampled("rkl"))
    print(f"sequence {variance(policy, sampled('rkl', 'sequence')):.3f}")


def test_later_tokens_are_those_of_the_same_sequence() -> None:
    logp = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 48.0], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 2, 5, 5, 5])
    out = sampled_divergence_loss(logp, logp.detach(), teacher, torch.zeros(7).double(), sequences=labels)
    (weights,) = torch.autograd.grad(out.per_token.sum(), logp)
    later = torch.tensor([6.0, 4.0, 0.0, 0.0, 80.0, 48.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(-weights, teacher + later)
    empty = torch.zeros(0, dtype=torch.float64)
    nothing = sampled_divergence_loss(empty, empty, empty, empty, sequences=torch.zeros(0, dtype=torch.long))
    assert nothing.per_token.numel() == 0


def lumped(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """KL of rows of log-probs over the tokens ``ids`` [n, k] and one outcome for all others."""

    def cut(rows: Tensor) -> Tensor:
        chosen = rows.gather(1, ids)
        return torch.cat([chosen, torch.log1p(-chosen.exp().sum(1, keepdim=True))], 1)

    a, b = cut(p), cut(q)
    return (a.exp() * (a - b)).sum(1)


@pytest.mark.parametrize("direction", ["rkl", "fkl"])
@pytest.mark.parametrize(("chunk", "adapter"), [(1, False), (5, False), (5, True), (64, False)])
@pytest.mark.parametrize("likeliest", [None, 4])
def test_the_exact_divergence(direction: Any, chunk: int, adapter: bool, likeliest: int | None) -> None:
    """Over the vocabulary, or over the likeliest tokens of a teacher that gives no others."""
    generator = torch.Generator().manual_seed(4)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    n, vocab, padded = 13, 37, 40
    hidden, weight = draw(n, 8).requires_grad_(), draw(padded, 8).requires_grad_()
    whole = TeacherRow(draw(n, 5), draw(padded, 5), direction)
    others = (whole.hidden.double() @ whole.weight[:vocab].double().t()).log_softmax(-1)
    logps, ids = others.topk(likeliest or 1)
    known = torch.arange(n) != 5
    row = TeacherTop(ids, logps.float(), known, direction) if likeliest else whole
    targets = torch.randint(0, vocab, (n,), generator=generator)
    targets[0] = ids[0, 0]  # a sampled token among the likeliest
    d_rows = draw(3, n)

    # Some columns as an adapter's, which adds the same to the logits.
    (h, narrow), (w, b) = (x.split([6, 2], 1) for x in (hidden, weight))
    inputs = (h, w) if adapter else (hidden, weight)
    head = Head(1.0, chunk, vocab, teacher=row)
    rows = torch.stack(token_logprobs(*inputs, targets, head, added=(narrow, b) if adapter else None))
    actual = torch.autograd.grad((rows * d_rows).sum(), [hidden, weight])

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    own = (wide[0] @ wide[1][:vocab].t()).log_softmax(-1)
    p, q = (own, others) if direction == "rkl" else (others, own)
    exact = lumped(p, q, ids) * known if likeliest else (p.exp() * (p - q)).sum(-1)
    reference = torch.stack([own.gather(1, targets[:, None])[:, 0], -(own.exp() * own).sum(-1), exact])
    expected = torch.autograd.grad((reference * d_rows).sum(), wide)

    torch.testing.assert_close(rows.double(), reference, atol=1e-5, rtol=1e-5)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-4)
    assert not actual[1][vocab:].any(), "rows of padding are no tokens"


@pytest.mark.parametrize("direction", ["rkl", "fkl"])
def test_the_bias_of_the_likeliest_tokens(direction: str) -> None:
    """A lower bound of the divergence, closer the more tokens; docs/evidence/distillation.md."""
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(64, 200, generator=generator, dtype=torch.float64)
    own = (logits + torch.randn(64, 200, generator=generator, dtype=torch.float64)).requires_grad_()
    p, q = own.log_softmax(-1), logits.log_softmax(-1)
    pair = (p, q) if direction == "rkl" else (q, p)
    whole = (pair[0].exp() * (pair[0] - pair[1])).sum(1).mean()
    (exact,) = torch.autograd.grad(whole, own, retain_graph=True)
    errors = []
    for k in (1, 4, 16, 64, 199):
        value = lumped(*pair, q.topk(k)[1]).mean()
        (biased,) = torch.autograd.grad(value, own, retain_graph=True)
        errors.append((1 - (value / whole).item(), ((biased - exact).norm() / exact.norm()).item()))
        print(f"{direction}, k {k}: missing {errors[-1][0]:.1%}, gradient off by {errors[-1][1]:.1%}")
    assert all(a[0] > b[0] and a[1] > b[1] for a, b in pairwise(errors))
    assert errors[-1] == pytest.approx((0.0, 0.0), abs=1e-6), "with all tokens but one nothing is lost"


def test_the_reward_beside_the_exact_divergence() -> None:
    logp = torch.randn(6, dtype=torch.float64, requires_grad=True)
    divergence = torch.rand(6, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(6, dtype=torch.float64)
    out = full_divergence_loss(logp, divergence, logp.detach(), advantages)
    by_logp, by_divergence = torch.autograd.grad(out.per_token.sum(), [logp, divergence])
    torch.testing.assert_close(by_logp, -advantages)
    torch.testing.assert_close(by_divergence, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(out.metrics["kl"], divergence.detach())


def test_errors() -> None:
    head = Head(1.0, 2, 4, teacher=TeacherRow(torch.zeros(3, 2), torch.zeros(4, 2), "rkl"))
    with pytest.raises(ValueError, match="the teacher scored 3 positions, not 2"):
        token_logprobs(torch.zeros(2, 2), torch.zeros(4, 2), torch.zeros(2).long(), head)
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        token_logprobs(torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 4, 1]), head)
    with pytest.raises(ValueError, match="for rkl only"):
        sampled_divergence_loss(*torch.zeros(4, 2), divergence="fkl", sequences=torch.zeros(2).long())


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk"),
    [(600, 5000, 64), pytest.param(8192, 151_936, 256, marks=pytest.mark.long)],
    ids=["small", "8192 tokens, 151936 rows"],
)
@pytest.mark.parametrize("direction", ["rkl", "fkl"])
def test_at_most_three_chunks_of_logits_are_in_memory(
    direction: Any, tokens: int, vocab: int, chunk: int
) -> None:
    """Besides inputs, gradients of hidden states and weight, and a few numbers for each token."""
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    row = TeacherRow(torch.randn(tokens, 8), torch.randn(vocab, 8), direction)
    targets = torch.randint(0, vocab, (tokens,))
    three, small = 3 * chunk * vocab * 4, 16 * 4 * tokens
    with AllocationWatch() as watch:
        rows = token_logprobs(hidden, weight, targets, Head(1.0, chunk, vocab, teacher=row))
        forward = watch.peak
        torch.stack(rows).sum().backward()  # type: ignore[no-untyped-call]
    print(
        f"chunks of logits at once: forward {3 * forward / three:.2f}, backward {3 * watch.peak / three:.2f}"
    )
    gradients = 2 * 4 * (hidden.numel() + weight.numel())
    assert 0.6 * three < forward <= three + small
    assert watch.peak <= three + small + gradients


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_held_teacher_scores_a_step_at_once(epochs: int) -> None:
    """Its weights are copied to a GPU for each call; every update gets the rows of its own mini-batch."""
    calls, updates = [], []

    def with_rows(packed: list[Any], direction: str) -> list[Any]:
        calls.append(direction)
        return [f"{micro} with rows" for micro in packed]

    trainer: Any = object.__new__(Trainer)
    done = UpdateStats(tokens=1, loss=0.0, abs_loss=0.0, metrics={}, grad_norm=0.0, skipped=False)
    trainer.settings = SimpleNamespace(
        full_divergence="rkl",
        sft=True,
        training=SimpleNamespace(ppo_epochs=epochs),
        rollout=SimpleNamespace(ahead=0),
    )
    trainer.policy = SimpleNamespace(
        pack=str,
        updating=nullcontext,
        update=lambda micro_batches, *_: updates.append(micro_batches) or done,
    )
    trainer.teacher = SimpleNamespace(with_rows=with_rows)
    trainer._old_from, trainer._learning_rate, trainer.anchor = "pass", lambda step: 0.0, None
    trainer._loss = trainer._aggregator = None
    batch: Any = SimpleNamespace(started=None, minibatches=[[1, 2], [3], [4, 5]], metrics={})
    trainer.update(1, batch, lambda *_: None)
    rows = [[f"{micro} with rows" for micro in minibatch] for minibatch in batch.minibatches]
    assert updates == rows * epochs
    assert calls == ["rkl"]

"""The chunked log-prob head equals log_softmax and its entropy, forward and backward, padding rows excluded.

Against float64 on one process: chunk sizes that do and do not divide the tokens, temperatures, a padded
vocabulary. Not covered: the vocabulary cut over ranks (tests/distributed/test_layouts.py), memory.
"""

from __future__ import annotations

import pytest
import torch

from rpg_megatron.policy.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
@pytest.mark.parametrize("padding", [0, 6])
def test_equals_float64(temperature: float, chunk: int, padding: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab, tokens, width = 250, 37, 48
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab + padding, width, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    mix = torch.randn(2, tokens, generator=generator)

    exact_h, exact_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(exact_h @ exact_w[:vocab].t() / temperature, -1)
    exact = torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    (exact * mix.double()).sum().backward()

    h, w = hidden.requires_grad_(), weight.requires_grad_()
    got = torch.stack(token_logprobs(h, w, targets, temperature=temperature, chunk=chunk, vocab=vocab))
    (got * mix).sum().backward()
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(h.grad.double(), exact_h.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(w.grad.double(), exact_w.grad, rtol=1e-5, atol=1e-4)
    if padding:
        assert w.grad[vocab:].abs().max() == 0


def test_target_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        token_logprobs(
            torch.ones(1, 4), torch.ones(12, 4), torch.tensor([11]), temperature=1.0, chunk=4, vocab=10
        )

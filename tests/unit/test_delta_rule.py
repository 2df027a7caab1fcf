"""The gated delta rule of trainers and engines on a CPU, in float64, against the recurrence token by token.

Why: it computes chunks of tokens with triangular systems, and steps from states that a cache holds. Not
covered: packed rows (test_delta_net); convolution, gates, cache (tests/integration/test_hybrid_engines.py).
"""

import pytest
import torch

from rpg_megatron.config.model_shape import CHUNK
from rpg_megatron.models.delta_rule import delta_rule


def recurrence(q, k, v, g, beta, state):
    """Equation 10 of the paper, for each token."""
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        change = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, :, t]))
        state = state + torch.einsum("nhk,nhv->nhkv", k[:, :, t], change)
        outs.append(torch.einsum("nhkv,nhk->nhv", state, q[:, :, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outs, 2), state


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 200])
@pytest.mark.parametrize("decay", [0.1, 60.0])
def test_chunks_are_the_recurrence(tokens: int, decay: float) -> None:
    """Also where a chunk's decay is far beyond the range of numbers."""
    torch.manual_seed(tokens)
    q, k = torch.nn.functional.normalize(torch.randn(2, 3, 6, tokens, 8, dtype=torch.float64), dim=-1)
    v = torch.randn(3, 6, tokens, 5, dtype=torch.float64)
    g, beta = torch.rand(2, 3, 6, tokens, dtype=torch.float64)
    state = torch.randn(3, 6, 8, 5, dtype=torch.float64)
    found = delta_rule(q, k, v, -decay * g, beta, state)
    for x, expected in zip(found, recurrence(q, k, v, -decay * g, beta, state), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-13)
    if tokens == 1:
        return
    first = delta_rule(*(x[:, :, : tokens // 2] for x in (q, k, v, -decay * g, beta)), state)
    rest = delta_rule(*(x[:, :, tokens // 2 :] for x in (q, k, v, -decay * g, beta)), first[1])
    torch.testing.assert_close(torch.cat([first[0], rest[0]], 2), found[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(rest[1], found[1], rtol=0, atol=1e-13)

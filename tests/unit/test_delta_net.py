"""What replaces FLA's kernels on a CPU computes what they are defined to compute, also in packed rows.

Why: a sequence that sees a token or a state of its neighbour, or a chunk that drops a decay, gives plausible
log-probs. Proved on ragged rows, with lengths around the size of a chunk and around the groups that share a
call: the rule against the paper's recurrence, token by token, the convolution against torch's, each with all
gradients in float64; the norm's epsilon against transformers' norm. Not covered: the layer (test_families).
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm as reference_l2norm

from rpg_megatron.policy import delta_net
from tests.support.tiny_models import delta_rule_by_token

LENGTHS = [40, 7, 63, 64, 65, 1, 131, 2, 3, 129, 128]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _same(ours: Tensor, reference: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """Outputs, and gradients of all inputs, differ by at most ``tolerance`` of the largest element."""
    weight = torch.randn_like(reference)
    pairs = [(ours, reference)]
    gradients = [torch.autograd.grad(out, inputs, weight, retain_graph=True) for out in (ours, reference)]
    for a, b in [*pairs, *zip(*gradients, strict=True)]:
        assert (a - b).abs().max().item() <= tolerance * b.abs().max().item()


@pytest.mark.parametrize("lengths", [LENGTHS, [300], [1], [5, 5, 5]], ids=str)
def test_rule_is_the_recurrence(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Tensor, "float", lambda x: x)  # the rule is float32; here it keeps float64
    total, heads, k, v = sum(lengths), 3, 6, 5
    query, key, value = _random(1, total, heads, k), _random(1, total, heads, k), _random(1, total, heads, v)
    g, beta = _random(1, total, heads), _random(1, total, heads)
    inputs = [query, key, value, g, beta]
    normed = [delta_net.l2norm(query), delta_net.l2norm(key), value, -g.square(), beta.sigmoid()]
    query, key, value, g, beta = normed
    ours, _ = delta_net.gated_delta_rule(query, key, value, g=g, beta=beta, cu_seqlens=_bounds(lengths))
    parts = zip(*(x.split(lengths, 1) for x in normed), strict=True)
    reference = torch.cat([delta_rule_by_token(*p, use_qk_l2norm_in_kernel=False)[0] for p in parts], 1)
    _same(ours, reference, inputs, 1e-12)


@pytest.mark.parametrize("kernel", [2, 4])
def test_convolution_sees_its_own_sequence(kernel: int) -> None:
    torch.manual_seed(0)
    x, weight = _random(1, sum(LENGTHS), 6), _random(6, kernel)
    ours, _ = delta_net.causal_conv1d(x, weight, None, "silu", cu_seqlens=_bounds(LENGTHS))
    parts = [
        silu(conv1d(pad(part.transpose(1, 2), (kernel - 1, 0)), weight[:, None], groups=6)).transpose(1, 2)
        for part in x.split(LENGTHS, 1)
    ]
    _same(ours, torch.cat(parts, 1), [x, weight], 1e-12)


def test_norm_has_its_epsilon() -> None:
    x = 1e-3 * torch.randn(4, 16)
    assert torch.allclose(delta_net.l2norm(x), reference_l2norm(x), rtol=1e-6, atol=0)
    assert not torch.allclose(delta_net.l2norm(x, 0.0), reference_l2norm(x), rtol=1e-3, atol=0)


def test_rule_is_finite_where_a_decay_underflows() -> None:
    g = torch.full((1, 70, 1), -200.0, requires_grad=True)
    x = torch.randn(1, 70, 1, 4, requires_grad=True)
    out, _ = delta_net.gated_delta_rule(
        x, x, x, g=g, beta=torch.full((1, 70, 1), 0.5), cu_seqlens=torch.tensor([0, 70])
    )
    assert torch.isfinite(out).all()
    for gradient in torch.autograd.grad(out.sum(), [x, g]):
        assert torch.isfinite(gradient).all()

"""Linear attention: Megatron's gated delta net, and what it takes from FLA (flash-linear-attention) on a CPU.

On a GPU Megatron's layer calls three functions of FLA. Its Triton kernels do not run on a CPU, so there the
layer gets functions of torch with the same arguments and results. The state is reset at every sequence. The
bounds of the sequences, ``cu_seqlens``, have their values on the host as the attribute ``on_host``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, lru_cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpg_megatron.models.delta_rule import delta_rule, l2norm
from rpg_megatron.policy.length_groups import LengthGroups, group_by_length


class DeltaNet(GatedDeltaNet):  # type: ignore[misc]  # untyped
    """Megatron's gated delta net with a plain norm, whatever the others are, and what is float32 on disk."""

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, layer_number: int, **more: Any
    ) -> None:
        """As Megatron calls it."""
        if not torch.cuda.is_available():
            _replace_fla()
        elif common.HAVE_FLA:
            _give_bounds_to_fla()
        else:
            raise RuntimeError("flash-linear-attention is missing")  # preflight checks it
        super().__init__(config, submodules, layer_number, **more)
        plain = copy(config)
        plain.layernorm_zero_centered_gamma, plain.params_dtype = False, torch.float32
        self.out_norm = submodules.out_norm(plain, self.value_head_dim, config.layernorm_epsilon)
        # The rates are exponents: bfloat16 would change them by up to 0.4%.
        given: Tensor = self.get_parameter("A_log")
        rates = torch.nn.Parameter(given.detach().float())
        vars(rates).update(vars(given))  # the marks of a tensor-parallel parameter
        self.register_parameter("A_log", rates)

    def _resolve_cu_seqlens(
        self, padded: None, actual: Any, total_seq_len: int, name: str, cp_size: int = 1
    ) -> Tensor:
        """Megatron's check of the bounds, on the host: its own waits for the device, five times a layer."""
        bounds: Tensor = actual.on_host
        if bounds[-1] != total_seq_len or (bounds.diff() % cp_size).any():
            raise ValueError(
                f"{name} {bounds.tolist()} does not suit {total_seq_len} tokens on {cp_size} ranks"
            )
        return actual  # type: ignore[no-any-return]


@cache
def _give_bounds_to_fla() -> None:
    """Call FLA with the bounds on the host, too; otherwise it reads those on the device."""

    def given(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*inputs: Any, cu_seqlens: Any, **more: Any) -> Any:
            return function(*inputs, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.on_host, **more)

        return call

    for name in ("causal_conv1d", "chunk_gated_delta_rule"):
        setattr(gdn, name, given(getattr(gdn, name)))


def _replace_fla() -> None:
    common.HAVE_FLA, common.l2norm = True, l2norm
    for module in (common, gdn):
        module.causal_conv1d, module.chunk_gated_delta_rule = causal_conv1d, gated_delta_rule


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: None, activation: str, *, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """SiLU of a depthwise convolution of each packed sequence, which sees its own tokens only.

    x: [1, t, d]. weight: [d, w]. cu_seqlens: [sequences + 1], where they begin and the last one ends.
    """
    starts = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff(), output_size=x.size(1))
    places = torch.arange(x.size(1), device=x.device) - starts
    out: Tensor = checkpoint(_convolve, x, weight, places, use_reentrant=False, preserve_rng_state=False)
    return out, None


def _convolve(x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """places: [t], position of each token in its sequence."""
    length, width = x.size(1), weight.size(1)
    out = x * weight[:, -1]
    for back in range(1, width):
        earlier = F.pad(x, (0, 0, back, 0))[:, :length].masked_fill((places < back)[:, None], 0)
        out = out + earlier * weight[:, -1 - back]
    return F.silu(out)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule over each packed sequence, in float32 (Yang et al. 2024, arXiv 2412.06464).

    query, key: [1, t, heads, key_dim], value: [1, t, heads, value_dim], g (log of the decay) and beta:
    [1, t, heads]. Returns [1, t, heads, value_dim]. Sequences of similar length are computed together.
    """
    groups = _groups(tuple(cu_seqlens.diff().tolist()))
    parts: tuple[Tensor, ...] = (query, key, value, g, beta)
    if groups.padded is not None:
        parts = tuple(x.index_select(1, groups.padded) for x in parts)
    sizes = [n * longest for n, longest in groups.shapes]
    out = []
    for *group, shape in zip(*(x[0].split(sizes) for x in parts), groups.shapes, strict=True):
        batch = [x.unflatten(0, shape).transpose(1, 2) for x in group]
        y = checkpoint(_rule, *batch, use_reentrant=False, preserve_rng_state=False)
        out.append(y.transpose(1, 2).flatten(0, 1))
    joined = torch.cat(out)
    return (joined if groups.restored is None else joined.index_select(0, groups.restored))[None], None


@lru_cache(maxsize=8)
def _groups(lengths: Sequence[int]) -> LengthGroups:
    return group_by_length(lengths, torch.device("cpu"))


def _rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Sequences of one length, from their start. Shapes: see ``delta_rule``."""
    q, k, v, decay, rate = (x.float() for x in (query, key, value, g, beta))
    out, _ = delta_rule(q, k, v, decay, rate, q.new_zeros(*q.shape[:2], k.size(-1), v.size(-1)))
    return out.to(value.dtype)

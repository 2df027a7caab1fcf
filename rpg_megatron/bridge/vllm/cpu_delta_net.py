"""Gated delta nets in float32 for vLLM's CPU build, whose own kernels take bfloat16 only.

What lies between a layer's input projection and its gated norm: a short convolution, and the gated delta rule
(Yang et al. 2024, arXiv 2412.06464). A sequence's states stay in its slot of vLLM's cache between steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rpg_megatron.models.delta_rule import delta_rule, l2norm


def in_float32(vllms: Callable[..., None]) -> Callable[..., None]:
    """The ``cpu_gdn_attention_core`` of vLLM, but for layers in float32, which are computed here.

    mixed: queries, keys and values of a batch's new tokens [tokens, channels]; b, a: [tokens, value heads];
    out: [tokens, value heads, value dim]. Neighbours in the batch with as many new tokens go together.
    """

    def core(mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, name: Any) -> None:
        from vllm.forward_context import get_forward_context
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as views
        from vllm.utils.torch_utils import _resolve_layer_name

        if mixed.dtype != torch.float32:
            # Its kernel refuses the strides that a batch of one token has as a part of the projection.
            return vllms(mixed.clone(memory_format=torch.contiguous_format), b, a, out, name)
        context: Any = get_forward_context()
        if context.attn_metadata is None:
            return None  # vLLM measures its memory, without a cache
        layer = context.no_compile_layers[_resolve_layer_name(name)]
        batch, weight = context.attn_metadata[layer.prefix], views._unpacked_conv_weight(layer)[:, None]
        conv, state = views._conv_buffer_view(layer), views._ssm_state_view(layer)
        gates = -layer.A_log.exp() * F.softplus(a + layer.dt_bias), b.sigmoid()
        count = batch.num_decodes + batch.num_prefills
        bounds = batch.non_spec_query_start_loc[: count + 1].tolist()
        slots = batch.non_spec_state_indices_tensor[:count].long()
        if batch.has_initial_state is not None:
            new = slots[~batch.has_initial_state[:count]]
            conv[new], state[new] = 0, 0
        for length, group in groupby(range(count), key=lambda i: bounds[i + 1] - bounds[i]):
            own = slots[members := list(group)]
            rows = slice(bounds[members[0]], bounds[members[-1] + 1])
            # [sequences, channels, tokens], with those that the convolution still covers in front.
            x = torch.cat([conv[own], mixed[rows].unflatten(0, (-1, length)).mT], -1)
            conv[own] = x[..., length:]
            x = F.silu(F.conv1d(x, weight, layer.conv1d.bias, groups=len(weight))).mT.flatten(0, 1)
            q, k, v = (y[0].unflatten(0, (-1, length)).transpose(1, 2) for y in layer.rearrange_mixed_qkv(x))
            g, beta = (gate[rows].unflatten(0, (-1, length)).mT for gate in gates)
            q, k = (l2norm(y).repeat_interleave(v.size(1) // y.size(1), 1) for y in (q, k))
            y, state[own] = delta_rule(q, k, v, g, beta, state[own])
            out[rows] = y.transpose(1, 2).flatten(0, 1)

    core.__signature__ = inspect.signature(vllms, eval_str=True)  # type: ignore[attr-defined]
    return core

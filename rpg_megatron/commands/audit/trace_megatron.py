"""Trainer side of an audit: the full outputs of the policy's modules, for any parallel layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from rpg_megatron.config import ModelShape
from rpg_megatron.models.activation_sites import FINAL_INPUT, FINAL_NORM, Trace, layer_site, split_site
from rpg_megatron.policy.attention import PackedAttention
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.collectives import gather_on_first
from rpg_megatron.system.dtypes import dtype_name, torch_dtype

_QKV, _GATE_UP = "qkv", "gate_up"  # Megatron computes these together; see _join
_HEADS = ("query_norm", "key_norm", "query_rope", "key_rope", "attention", "activation")
"""Sites sharded by heads or columns over the tensor ranks, in rank order. The others are replicated, except
that sequence parallelism shards the tokens.
"""

_Sent = tuple[str, np.ndarray]
"""A tensor between ranks: its dtype and, since numpy has no bfloat16, the bytes of its rows."""


def trace_policy(
    policy: Policy, shape: ModelShape, packs: Sequence[MicroBatch]
) -> list[tuple[Trace, Tensor]]:
    """Compute the log-probs of packs as in training, and record the outputs of all modules. Collective.

    Returns, on rank 0, each pack's trace [t, width] and its log-probs and entropies [2, t] with the pack's t
    positions, all on the CPU; an empty list on other ranks.
    """
    kept: dict[str, list[Tensor]] = defaultdict(list)
    with ExitStack() as stack:
        for remove in _hook(policy.chunks, kept):
            stack.callback(remove)
        scored = policy.logprobs(packs)
    mesh = policy.mesh
    coordinates = (mesh.pipeline_rank, mesh.context_rank, mesh.tensor_rank)
    sent = {site: [_send(call) for call in calls] for site, calls in kept.items()}
    # Data-parallel replicas computed the same; use the first one.
    own_calls = None if mesh.data_rank else (coordinates, sent)
    everyone = gather_on_first(own_calls, tuple[tuple[int, int, int], dict[str, list[_Sent]]] | None)
    if mesh.rank:
        return []
    # Each site is on one stage, where every context rank has its positions, sharded over the tensor ranks.
    ranks = sorted((e for e in everyone if e is not None), key=lambda e: e[0])
    shards: dict[str, list[list[list[Tensor]]]] = defaultdict(lambda: [[] for _ in range(mesh.context)])
    for (_, context_rank, _), values in ranks:
        for site, calls in values.items():
            shards[site][context_rank].append([_receive(call) for call in calls])
    traced = []
    for i, (pack, values) in enumerate(zip(packs, scored, strict=True)):
        trace: Trace = {}
        assert pack.packed.places is not None
        places = pack.packed.places.cpu()
        for site, by_context in shards.items():
            for held, by_rank in zip(places, by_context, strict=True):
                joined = _join(site, [calls[i] for calls in by_rank], shape, len(held))
                for name, part in joined.items():
                    whole = trace.setdefault(name, part.new_empty(pack.size, part.size(1)))
                    whole[held] = part
        traced.append((trace, values.cpu()))
    return traced


def _hook(chunks: Iterable[nn.Module], kept: dict[str, list[Tensor]]) -> Iterable[Callable[[], None]]:
    """Hook the modules of this rank; yields the functions that remove the hooks."""

    def keep(module: nn.Module, *after: str, before: Sequence[str] = ()) -> Callable[[], None]:
        """Record a module's inputs and outputs, the latter without the bias that linear layers return."""

        def record(_: nn.Module, args: Any, out: Any) -> None:
            outputs = out if isinstance(out, tuple) else (out,)
            for site, value in [*zip(before, args, strict=False), *zip(after, outputs, strict=False)]:
                kept[site].append(_rows(value))

        return module.register_forward_hook(record).remove

    def keep_norm(module: nn.Module, before: str, after: str) -> Callable[[], None]:
        """In Transformer Engine's dense layers the norm is fused into the next linear layer, and this module
        is an identity: the audit recomputes the output from the input.
        """
        return keep(module, *([] if isinstance(module, IdentityOp) else [after]), before=[before])

    for chunk in chunks:
        decoder: Any = chunk.decoder
        for layer in decoder.layers:

            def at(part: str, i: int = layer.layer_number - 1) -> str:
                return layer_site(i, part)

            attention, mlp = layer.self_attention, layer.mlp
            yield keep_norm(layer.input_layernorm, at("input"), at("input_norm"))
            yield keep(attention.linear_qkv, at(_QKV))
            if not isinstance(attention.q_layernorm, IdentityOp | None):
                yield keep(attention.q_layernorm, at("query_norm"))
                yield keep(attention.k_layernorm, at("key_norm"))
            core = attention.core_attention
            rotated = at("query_rope"), at("key_rope")
            if isinstance(core, PackedAttention):  # includes the rotation, unlike Transformer Engine's
                yield keep(core.rotary, *rotated)
                yield keep(core, at("attention"))
            else:
                yield keep(core, at("attention"), before=rotated)
            yield keep(attention.linear_proj, at("attention_output"))
            yield keep_norm(layer.pre_mlp_layernorm, at("middle"), at("mlp_norm"))
            if hasattr(mlp, "router"):
                yield _keep_logits(mlp.router, kept[at("router")])
                yield keep(mlp, at("experts"))
            else:
                yield keep(mlp.linear_fc1, at(_GATE_UP))
                yield keep(mlp.linear_fc2, at("mlp_output"), before=[at("activation")])
        if getattr(decoder, "final_layernorm", None) is not None:
            yield keep(decoder.final_layernorm, FINAL_NORM, before=[FINAL_INPUT])


def _send(rows: Tensor) -> _Sent:
    return dtype_name(rows.dtype), rows.view(torch.uint8).numpy()


def _receive(sent: _Sent) -> Tensor:
    dtype, rows = sent
    return torch.tensor(rows).view(torch_dtype(dtype))


def _rows(value: Tensor) -> Tensor:
    """A contiguous copy on the CPU: [t, width]."""
    return value.detach().reshape(value.size(0), -1).cpu().clone(memory_format=torch.contiguous_format)


def _keep_logits(router: Any, kept: list[Tensor]) -> Callable[[], None]:
    """Record the logits of a router, which no module returns, by wrapping ``TopKRouter.gating``."""
    plain = router.gating

    def gating(hidden: Tensor) -> Tensor:
        logits: Tensor = plain(hidden)
        kept.append(_rows(logits))
        return logits

    router.gating = gating
    return lambda: delattr(router, "gating")


def _join(site: str, shards: list[Tensor], shape: ModelShape, tokens: int) -> Trace:
    """Join one site's shards of the tensor ranks; two or three sites if Megatron computes them as one."""
    layer, part = split_site(site)
    if layer is not None and part == _QKV:
        # By query group: its query heads, its key head, its value head.
        queries = shape.num_heads // shape.num_kv_heads
        grouped = torch.cat(shards, 1).view(tokens, shape.num_kv_heads, queries + 2, shape.head_dim)
        q, k, v = grouped.split([queries, 1, 1], dim=2)
        return {layer_site(layer, n): x.flatten(1) for n, x in (("query", q), ("key", k), ("value", v))}
    if layer is not None and part == _GATE_UP:
        halves = [s.chunk(2, 1) for s in shards]
        both = (torch.cat(h, 1) for h in zip(*halves, strict=True))
        return {layer_site(layer, n): x for n, x in zip(("gate", "up"), both, strict=True)}
    if part in _HEADS:
        # With more ranks than key/value heads, neighbouring ranks hold the same head.
        step = max(1, len(shards) // shape.num_kv_heads) if part.startswith("key") else 1
        return {site: torch.cat(shards[::step], 1)}
    if shards[0].size(0) < tokens:
        return {site: torch.cat(shards)}
    return {site: shards[0]}

"""Trainer side of an audit: the full outputs of the policy's modules, for any parallel layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.identity_op import IdentityOp
from numpy.typing import NDArray
from torch import Tensor, nn

from rpg_megatron.config import ModelShape
from rpg_megatron.models.activation_sites import FINAL_INPUT, FINAL_NORM, Trace, layer_site, split_site
from rpg_megatron.policy.layers import PackedAttention
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.collectives import gather_on_first
from rpg_megatron.system.dtypes import dtype_name, torch_dtype

_QKV, _GATE_UP = "qkv", "gate_up"  # Megatron computes these together; see _join
_HEADS = ("query_norm", "key_norm", "query_rope", "key_rope", "attention", "activation")
"""Sites sharded by heads or columns over the tensor ranks, in rank order. The others are replicated, except
that sequence parallelism shards the tokens.
"""

_Sent = tuple[str, tuple[int, ...], np.ndarray]
"""A tensor between ranks: its dtype, its shape and, since numpy has no bfloat16, its bytes."""


def trace_policy(
    policy: Policy, shape: ModelShape, packs: Sequence[MicroBatch]
) -> list[tuple[Trace, Tensor]]:
    """Compute the log-probs of packs as in training, and record the outputs of all modules. Collective.

    Returns, on rank 0, each pack's trace [t, width] and its log-probs and entropies [2, t] with the pack's t
    positions, all on the CPU; an empty list on other ranks.
    """
    kept: dict[str, list[Tensor]] = defaultdict(list)
    with ExitStack() as stack:
        for handle in _hook(policy.chunks, kept):
            stack.callback(handle.remove)
        scored = policy.logprobs(packs)
    mesh = policy.mesh
    # Data-parallel replicas computed the same; use the first one.
    coordinates = (mesh.pipeline_rank, mesh.context_rank, mesh.tensor_rank)
    own_calls = None
    if mesh.data_rank == 0:
        own_calls = coordinates, {site: [_send(call) for call in calls] for site, calls in kept.items()}
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


def _send(tensor: Tensor) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.flatten().view(torch.uint8).numpy()


def _receive(sent: tuple[str, tuple[int, ...], NDArray[np.uint8]]) -> Tensor:
    dtype, shape, values = sent
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(values))
    return tensor


def _hook(chunks: Iterable[nn.Module], kept: dict[str, list[Tensor]]) -> Iterable[Any]:
    """Hook the modules of this rank; yields the handles that remove the hooks."""

    def keep(module: nn.Module, take: Callable[[Any, Any], dict[str, Tensor]]) -> Any:
        def after(_: nn.Module, args: Any, out: Any) -> None:
            for site, value in take(args, out).items():
                kept[site].append(value.detach().reshape(value.size(0), -1).cpu().clone())

        return module.register_forward_hook(after)

    def first(site: str) -> Callable[[Any, Any], dict[str, Tensor]]:
        """The output; linear layers also return a bias."""
        return lambda args, out: {site: out[0] if isinstance(out, tuple) else out}

    def both(*sites: str) -> Callable[[Any, Any], dict[str, Tensor]]:
        """The two outputs."""
        return lambda args, out: dict(zip(sites, out, strict=True))

    def entering(*sites: str) -> Callable[[Any, Any], dict[str, Tensor]]:
        """The inputs and the output."""
        *before, after = sites
        return lambda args, out: {**dict(zip(before, args, strict=False)), **first(after)(args, out)}

    def norm(module: nn.Module, before: str, after: str) -> Callable[[Any, Any], dict[str, Tensor]]:
        """The input of a norm, and its output if this module computes it.

        In Transformer Engine's dense layers the norm is fused into the next linear layer, and this module is
        an identity. A hook cannot see the output, so the audit recomputes it from the input.
        """
        if isinstance(module, IdentityOp):
            return lambda args, _: {before: args[0]}
        return entering(before, after)

    for chunk in chunks:
        decoder: Any = chunk.decoder
        for layer in decoder.layers:

            def at(part: str, i: int = layer.layer_number - 1) -> str:
                return layer_site(i, part)

            attention, mlp = layer.self_attention, layer.mlp
            before = layer.input_layernorm
            yield keep(before, norm(before, at("input"), at("input_norm")))
            yield keep(attention.linear_qkv, first(at(_QKV)))
            if not isinstance(attention.q_layernorm, IdentityOp | None):
                yield keep(attention.q_layernorm, first(at("query_norm")))
                yield keep(attention.k_layernorm, first(at("key_norm")))
            core = attention.core_attention
            rotated = at("query_rope"), at("key_rope")
            if isinstance(core, PackedAttention):  # includes the rotation, unlike Transformer Engine's
                yield keep(core.rotary, both(*rotated))
                yield keep(core, first(at("attention")))
            else:
                yield keep(core, entering(*rotated, at("attention")))
            yield keep(attention.linear_proj, first(at("attention_output")))
            before = layer.pre_mlp_layernorm
            yield keep(before, norm(before, at("middle"), at("mlp_norm")))
            if hasattr(mlp, "router"):
                yield _KeptLogits(mlp.router, kept[at("router")])
                yield keep(mlp, first(at("experts")))
            else:
                yield keep(mlp.linear_fc1, first(at(_GATE_UP)))
                yield keep(mlp.linear_fc2, entering(at("activation"), at("mlp_output")))
        if getattr(decoder, "final_layernorm", None) is not None:
            yield keep(decoder.final_layernorm, entering(FINAL_INPUT, FINAL_NORM))


class _KeptLogits:
    """Records the logits of a router, which no module returns, by wrapping ``TopKRouter.gating``.

    The wrapper stays until ``remove``.
    """

    def __init__(self, router: Any, kept: list[Tensor]):
        self._router, plain = router, router.gating

        def gating(hidden: Tensor) -> Tensor:
            logits: Tensor = plain(hidden)
            kept.append(logits.detach().reshape(logits.size(0), -1).cpu().clone())
            return logits

        router.gating = gating

    def remove(self) -> None:
        """Restore the original method."""
        del self._router.gating


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

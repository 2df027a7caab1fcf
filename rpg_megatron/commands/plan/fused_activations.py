"""Activation memory of a micro-batch with Transformer Engine layers (``model.implementation``).

Counted from the sources of Transformer Engine 2.20.2 and Megatron-Core 0.19.2, tensor by tensor as
passed to ``save_for_backward``, shared memory once; not measured on a GPU. Not counted: tensors with one
number per sequence (lengths, random states) and the rotary angles, 4 bytes x head size x longest sequence for
all layers together. ``docs/plan.md`` has the same table with references to the sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpg_megatron.commands.plan.activations import Recompute, Widths
from rpg_megatron.commands.plan.experts import routed_bytes
from rpg_megatron.config import Settings
from rpg_megatron.config.policy import FP8Settings

_WIDE = 4
"""Bytes of a float32 number: 1/rms of norms, log-sum-exp of attention."""
_BLOCK = 128
"""Values that share one float32 scale with the blockwise recipe."""
_LINEAR = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
"""The parameters that FP8 recipes quantise."""


def uses_fused_layers(settings: Settings, device: str) -> bool:
    """Whether the policy's layers are Transformer Engine's on this kind of device (cpu, cuda).

    The same rule as ``policy.precision.uses_transformer_engine``, assuming that the package is installed.
    """
    wanted, dtype = settings.model.implementation, settings.precision.dtype
    return device == "cuda" and dtype == "bfloat16" and wanted != "local"


@dataclass(frozen=True)
class Saved:
    """One tensor saved for the backward pass."""

    name: str
    nbytes: float
    """Bytes per token of a context rank, in one layer."""


def saved_tensors(
    w: Widths, *, qk_norm: bool, recompute: Recompute, fp8: FP8Settings | None = None, experts: bool = False
) -> tuple[Saved, ...]:
    """The tensors that one layer saves, in the order of the forward pass.

    fp8: None for a layer in bfloat16. experts: whether the layer has experts instead of a dense MLP.
    Context parallelism does not change them: a rank saves its own queries and output, and the keys and values
    of one rank, the last received ones (AttnFuncWithCPAndKVP2P).
    """
    stream = Saved("layer's input, which the first norm reads", w.item * w.hidden)
    if recompute == "full":
        return (stream,)
    # Only one orientation, that of the weight gradient's GEMM; with sequence parallelism and one scale per
    # tensor the other, from which it is computed after the all-gather. One byte per element in both cases.
    quantised = w.item if fp8 is None else 1 + (_WIDE / _BLOCK if fp8.recipe == "blockwise" else 0)
    found = [
        stream,
        Saved("1/rms", _WIDE * w.hidden / w.whole),
        Saved("first norm's output, read by QKV", quantised * w.hidden),
    ]
    if qk_norm:
        found += [
            Saved("queries before their norm", w.item * w.query),
            Saved("keys before their norm", w.item * w.key),
            Saved("1/rms of query and key heads", _WIDE * (w.heads + w.kv_heads)),
        ]
    found += [
        Saved("queries, rotated", w.item * w.query),
        Saved("keys, rotated", w.item * w.key),
        Saved("values", w.item * w.key),
        # The projection reads the same memory. In FP8 it has its own tensor only with delayed scaling, whose
        # scale has changed by the backward pass.
        Saved("attention's output", w.item * w.query),
        Saved("log-sum-exp of each head", _WIDE * w.heads),
    ]
    if fp8 is not None and fp8.recipe == "delayed":
        found.append(Saved("the same in FP8, read by the projection", quantised * w.query))
    found.append(Saved("attention's sum with the stream, which the second norm reads", w.item * w.hidden))
    if experts and w.experts is not None:
        # The norm is a separate module, and is saved with selective recomputation, which starts after it.
        found += [
            Saved("1/rms, second", _WIDE * w.hidden / w.whole),
            Saved("second norm's output, read by the router", w.item * w.hidden),
        ]
        if recompute == "none":
            routed = routed_bytes(w.experts, w.whole, w.item, fused=True)
            found.append(Saved("rows of the experts, indices and weights of the router", routed))
        return tuple(found)
    if recompute == "selective":  # up to the MLP's input; the norm is part of the MLP here
        return tuple(found)
    return (
        *found,
        Saved("1/rms, second", _WIDE * w.hidden / w.whole),
        Saved("second norm's output, read by the first linear layer", quantised * w.hidden),
        Saved("gate|up", w.item * 2 * w.ffn),
        Saved("silu(gate) x up, read by the second linear layer", quantised * w.ffn),
    )


def fused_layer_bytes(
    w: Widths,
    tokens: float,
    *,
    qk_norm: bool,
    recompute: Recompute,
    fp8: FP8Settings | None = None,
    experts: bool = False,
) -> float:
    """Bytes that one layer saves. tokens: of the micro-batch, per context rank."""
    saved = saved_tensors(w, qk_norm=qk_norm, recompute=recompute, fp8=fp8, experts=experts)
    return tokens * sum(t.nbytes for t in saved)


def fused_head_bytes(w: Widths) -> float:
    """Bytes per token that the last stage saves after the layers: final norm and log-prob head.

    The norm's input and 1/rms; the head's input, of all tokens; targets, two normalisers, entropy.
    """
    return w.item * w.hidden + _WIDE * w.hidden / w.whole + w.item * w.whole + 20


def in_fp8(fp8: FP8Settings | None, layer: int, layers: int) -> bool:
    """Whether a layer (index from 0, of ``layers``) computes in FP8."""
    return fp8 is not None and fp8.first_last_bf16 <= layer < layers - fp8.first_last_bf16


def fp8_weight_bytes(fp8: FP8Settings | None, sizes: Iterable[tuple[str, int]], layers: int) -> int:
    """Bytes of the second copy of a rank's linear weights besides ``parameters``: 2 bytes per element.

    FP8 copies in both orientations, for forward and backward pass, beside the bfloat16 weights; or, with
    ``fp8.parameters``, the parameters are these, and the copy is bfloat16 for the engines. On GPUs with GEMMs
    for any orientation (Blackwell), recipes with one scale per tensor need one byte less.

    sizes: name and number of elements of each parameter of the rank; layers: of the model.
    """
    return sum(
        2 * size
        for name, size in sizes
        if name.endswith(_LINEAR) and in_fp8(fp8, int(name.split(".")[2]), layers)
    )

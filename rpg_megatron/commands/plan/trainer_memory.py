"""Memory of a trainer rank by part, in bytes. ``docs/plan.md`` gives the source of each number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.activations import (
    Recompute,
    head_bytes,
    in_flight,
    layer_bytes,
    widths,
    working_bytes,
)
from rpg_megatron.commands.plan.experts import Routes, expert_replicas
from rpg_megatron.commands.plan.fused_activations import (
    fp8_weight_bytes,
    fused_head_bytes,
    fused_layer_bytes,
    in_fp8,
    uses_fused_layers,
)
from rpg_megatron.commands.plan.parameters import layers_of, rank_parameters, rank_sizes
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.system.dtypes import ITEM_BYTES

Phase = Literal["always", "update", "reduce", "optimizer", "log-probs"]
Basis = Literal["exact", "estimated"]

RESERVE = 3 * 1024**3
"""On a GPU: CUDA context, NCCL buffers, workspaces, fragmentation. Not measured; a rule of thumb."""
IMPORTS = 712_000_000
"""On a CPU: memory of a rank after importing torch, Megatron and transformers; measured."""
RUNTIME = 50_000_000
"""On a CPU: further memory besides tensors (gloo, oneDNN, Python objects); measured."""
MALLOC = 0.07
"""On a CPU: fragmentation of malloc by freed tensors, relative to the tensors' bytes. Fitted to
measurements of 2% to 16%; 0 if every tensor had its own pages.
"""
MALLOC_EXPERTS = 0.15
"""The same for a mixture of experts, whose tensors are smaller and vary in size with the routing. Fitted to
measurements of 6% to 29%.
"""

LARGEST_KEPT = 32 * 1024**2
"""On a CPU: glibc returns freed tensors of this size or more to the system; smaller ones stay."""

WORKSPACES = "weights in FP8"
"""Name of a part: rebuilt after engines used the GPU."""
SERVED = "weights in bfloat16, for engines"
"""Name of a part: copy of parameters stored in FP8."""


@dataclass(frozen=True)
class MemoryPart:
    """A part of a process's memory."""

    name: str
    nbytes: int
    basis: Basis
    phase: Phase = "always"
    """When it is allocated; the peak is ``always`` plus the largest other phase."""
    host: bool = False
    """Whether it is in host memory while the policy is on a GPU."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of a trainer rank."""

    stage: int
    publishes: bool
    """Whether it publishes weights to the engines: data and context rank 0."""
    parameters: int
    """Number of parameters on this rank."""
    parts: tuple[MemoryPart, ...]

    def total(self, *phases: Phase) -> int:
        """Bytes of these phases on the device."""
        return sum(p.nbytes for p in self.parts if p.phase in phases and not p.host)

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes of each phase."""
        found = {p.phase: 0 for p in self.parts if p.phase != "always" and not p.host}
        return {phase: self.total("always", phase) for phase in found}

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return max(self.phases.values())

    @property
    def host(self) -> int:
        """Bytes in host memory, if the policy is on a GPU."""
        return sum(p.nbytes for p in self.parts if p.host)


def state_bytes(dtype: str, *, distributed: bool, replicas: int) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer state.

    Gradients are accumulated and reduced in float32, in a full buffer on every rank. AdamW has two float32
    moments (Schedule-Free AdamW a point and a moment); 16-bit weights also have a float32 copy. The
    distributed optimizer shards copy and moments over the data x context replicas: 6 + 12/replicas bytes in
    bfloat16, 18 without it.
    """
    item = ITEM_BYTES[dtype]
    state = 8 + (4 if item < 4 else 0)
    return item, 4, state / (replicas if distributed else 1)


def rank_memory(
    settings: Settings,
    shape: ModelShape,
    *,
    stage: int,
    publishes: bool,
    lengths: Sequence[int],
    microbatches: int,
    device: Literal["cpu", "cuda"],
) -> RankMemory:
    """The memory of one rank.

    lengths: tokens of each sequence in its replica's largest micro-batch; microbatches: per update.
    """
    parallel, dtype = settings.parallel, settings.precision.dtype
    tokens, replicas = -(-sum(lengths) // parallel.context), parallel.data * parallel.context
    mine = rank_parameters(shape, parallel, stage, settings.model.vocab_multiple)
    count, in_experts, largest = mine.total, mine.in_experts, mine.largest
    groups = ((count - in_experts, replicas), (in_experts, expert_replicas(parallel)))
    distributed = settings.optimizer.distributed
    weights, gradients, _ = state_bytes(dtype, distributed=distributed, replicas=1)
    state = sum(n * state_bytes(dtype, distributed=distributed, replicas=r)[2] for n, r in groups)
    # One replica publishes the rest; the first ranks that hold an expert publish it.
    published = count if publishes else in_experts if parallel.expert * parallel.expert_tensor > 1 else 0
    parts = [
        MemoryPart("parameters", round(weights * count), "exact"),
        *_fp8_parts(settings, shape, stage, device),
        MemoryPart("gradients", round(gradients * count), "exact"),
        MemoryPart("optimizer", round(state * (1 - settings.memory.offload_optimizer)), "exact"),
        *_offloaded_parts(settings, state),
        *_sleep_offload_parts(settings, state, device),
        *_bridge_parts(settings, round(weights * published), device=device),
    ]
    if settings.anchor.type != "old":
        parts.append(MemoryPart("held anchor", round(weights * count), "exact", host=device == "cuda"))

    last = stage == parallel.pipeline - 1
    recompute = recomputation(settings)
    activations = activation_bytes(settings, shape, stage, lengths, microbatches, recompute, device)
    logits = _logits_bytes(settings, shape, tokens) if last else 0
    rows = shape.padded_vocab(parallel.tensor, settings.model.vocab_multiple) // parallel.tensor
    output = rows * shape.hidden_size
    working = _working(settings, shape, stage, lengths, device)
    # The head's backward pass runs first, with all activations saved; a layer's working set comes after it.
    head = logits + output * (4 + (weights if weights < 4 else 0)) if last else 0
    parts += [
        MemoryPart("activations", activations, "estimated", "update"),
        MemoryPart("logits chunk, gradients in work", max(working, round(head)), "estimated", "update"),
        MemoryPart("a layer and a logits chunk", working + logits, "estimated", "log-probs"),
    ]
    if device == "cpu":
        # AdamW on the CPU has two temporaries of the size of the current parameter or its shard; fused
        # optimizers on a GPU have none.
        share = replicas if distributed else 1
        parts.append(
            MemoryPart("optimizer's temporaries", 2 * 4 * largest // share, "estimated", "optimizer")
        )
        if replicas > 1 and distributed:
            # gloo's reduce-scatter copies the whole buffer, also that of experts that only this rank has. The
            # copy has its own pages, besides those of the backward pass, which malloc keeps.
            parts.append(MemoryPart("copy of the gradients", 4 * count, "estimated", "reduce"))
        tensors = RankMemory(stage, publishes, count, tuple(parts)).peak
        if replicas > 1 and distributed:
            kept = activations + (working if logits // 2 >= LARGEST_KEPT else max(working, round(head)))
            parts.append(MemoryPart("freed activations, kept by malloc", kept, "estimated", "reduce"))
        fragments = MALLOC if shape.experts is None else MALLOC_EXPERTS
        parts.append(MemoryPart("malloc, libraries", RUNTIME + round(fragments * tensors), "estimated"))
    return RankMemory(stage, publishes, count, tuple(parts))


def _fp8_parts(settings: Settings, shape: ModelShape, stage: int, device: str) -> list[MemoryPart]:
    """The second copy of the weights if layers compute in FP8."""
    fp8 = settings.precision.fp8
    if fp8 is None or not uses_fused_layers(settings, device):
        return []
    name, sizes = SERVED if fp8.parameters else WORKSPACES, rank_sizes(shape, settings, stage)
    return [MemoryPart(name, fp8_weight_bytes(fp8, sizes.items(), shape.num_layers), "estimated")]


def _offloaded_parts(settings: Settings, state: float) -> list[MemoryPart]:
    """The share of the optimizer's state in host memory, and the float32 gradients copied there."""
    share = settings.memory.offload_optimizer
    if not share:
        return []
    # Complete tensors are moved until the share is reached; 12 bytes of state come with 4 of gradient.
    return [MemoryPart("optimizer off the GPU", round(share * state * 16 / 12), "estimated", host=True)]


def _sleep_offload_parts(settings: Settings, state: float, device: str) -> list[MemoryPart]:
    """Host memory for the optimizer state while engines use the GPU; not released in between."""
    if not settings.engine.colocated:
        return []
    nbytes = round(state * (1 - settings.memory.offload_optimizer))
    return [MemoryPart("optimizer while engines sample", nbytes, "exact", host=device == "cuda")]


def recomputation(settings: Settings) -> Recompute:
    """The recomputation mode of these settings."""
    return settings.memory.recompute_for(settings.tokens_at_once)


def saved_by_layer(
    settings: Settings,
    shape: ModelShape,
    lengths: Sequence[int],
    recompute: Recompute,
    device: str,
    *,
    fp8: bool = False,
    experts: bool = False,
    routes: Routes = "even",
) -> float:
    """Bytes that one layer saves for one micro-batch.

    fp8: whether this layer computes in FP8; experts: whether it has experts; routes: how tokens choose them.
    """
    w = widths(shape, settings.parallel, settings.precision.dtype, routes)
    if not uses_fused_layers(settings, device):
        return layer_bytes(w, lengths, qk_norm=shape.qk_norm, recompute=recompute, experts=experts)
    return fused_layer_bytes(
        w,
        sum(lengths) / w.context,
        qk_norm=shape.qk_norm,
        recompute=recompute,
        fp8=settings.precision.fp8 if fp8 else None,
        experts=experts,
    )


def activation_bytes(
    settings: Settings,
    shape: ModelShape,
    stage: int,
    lengths: Sequence[int],
    microbatches: int,
    recompute: Recompute,
    device: str,
    routes: Routes = "even",
) -> int:
    """Bytes that a rank saves for all micro-batches in flight. routes: how tokens choose experts."""
    parallel, fp8 = settings.parallel, settings.precision.fp8
    w = widths(shape, parallel, settings.precision.dtype)
    layers = [n for part in layers_of(shape, parallel, stage) for n in part]
    kinds = Counter((in_fp8(fp8, n, shape.num_layers), shape.has_experts(n)) for n in layers)
    whole = sum(
        number
        * saved_by_layer(settings, shape, lengths, recompute, device, fp8=on, experts=experts, routes=routes)
        for (on, experts), number in kinds.items()
    )
    saved = in_flight(stage, parallel, microbatches) * whole / parallel.virtual
    if stage == parallel.pipeline - 1:
        head = fused_head_bytes(w) if uses_fused_layers(settings, device) else head_bytes(w)
        saved += sum(lengths) / parallel.context * head
    return round(saved)


def _working(
    settings: Settings,
    shape: ModelShape,
    stage: int,
    lengths: Sequence[int],
    device: str,
    routes: Routes = "even",
) -> int:
    """Bytes of the largest backward pass of one layer, including its recomputed activations."""
    parallel, recompute = settings.parallel, recomputation(settings)
    w = widths(shape, parallel, settings.precision.dtype, routes)
    tokens, fused = -(-sum(lengths) // parallel.context), uses_fused_layers(settings, device)
    most = 0.0
    for experts in {shape.has_experts(n) for part in layers_of(shape, parallel, stage) for n in part}:
        kept, whole = (
            saved_by_layer(settings, shape, lengths, r, device, experts=experts, routes=routes)
            for r in (recompute, "none")
        )
        most = max(most, working_bytes(w, tokens, experts=experts, fused=fused) + whole - kept)
    return round(most)


def worst_case_routing_bytes(
    settings: Settings,
    shape: ModelShape,
    stage: int,
    lengths: Sequence[int],
    microbatches: int,
    device: str,
) -> int:
    """Additional bytes of a rank in an update if all tokens choose its experts; 0 for a dense model."""
    if shape.experts is None:
        return 0

    def needed(routes: Routes) -> int:
        recompute = recomputation(settings)
        saved = activation_bytes(settings, shape, stage, lengths, microbatches, recompute, device, routes)
        return saved + _working(settings, shape, stage, lengths, device, routes)

    return needed("worst") - needed("even")


def _logits_bytes(settings: Settings, shape: ModelShape, tokens: int) -> int:
    """Chunked log-probs: the float32 logits and probabilities of a chunk."""
    chunk = settings.training.logprob_chunk
    rows = shape.padded_vocab(settings.parallel.tensor, settings.model.vocab_multiple)
    return 2 * 4 * min(chunk, tokens) * rows // settings.parallel.tensor


def _bridge_parts(settings: Settings, published: int, *, device: str) -> list[MemoryPart]:
    """Memory for publishing weights. published: bytes that this rank sends if one replica publishes.

    With ``process_group`` all ranks send.
    """
    bridge, parallel, engine = settings.bridge, settings.parallel, settings.engine
    if bridge.transport == "process_group":
        # A worker divides its bucket budget among its senders, each of which allocates the same for it.
        workers = engines_of_a_replica(engine.replicas, parallel) * engine.tensor
        buckets = bridge.bucket_mib * 1024**2 * workers // (parallel.tensor * parallel.pipeline)
        host = device == "cuda" and engine.colocated
        return [MemoryPart("bridge: buckets", buckets, "estimated", host=host)]
    if not published or bridge.transport == "cuda_ipc":
        return []
    if device == "cpu" and not settings.optimizer.distributed:
        return [MemoryPart("bridge: parameters lie in shared memory", 0, "exact")]
    return [MemoryPart("bridge: copy in shared memory", published, "exact", host=device == "cuda")]


def engines_of_a_replica(engines: float, parallel: ParallelSettings, data: float | None = None) -> int:
    """Maximum number of engines that read from one data- and context-parallel replica (``process_group``).

    Engine e reads from replica e modulo the number of replicas. data: overrides ``parallel.data``.
    """
    return math.ceil(engines / max(1.0, (data or parallel.data) * parallel.context))

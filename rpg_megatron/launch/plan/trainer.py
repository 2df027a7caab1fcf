"""Bytes that a trainer rank holds, part by part. ``docs/plan.md`` says where each number comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.bridge.layouts import Layout, layout_for
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.launch.plan.activations import (
    ITEM_BYTES,
    Recompute,
    head_bytes,
    in_flight,
    layer_bytes,
    widths,
    working_bytes,
)

Phase = Literal["always", "update", "reduce", "optimizer", "log-probs"]
Basis = Literal["exact", "estimated"]

RESERVE = 3 * 1024**3
"""On a GPU: CUDA context, NCCL's buffers, workspaces, fragmentation. Not measured; a rule of thumb."""
IMPORTS = 712_000_000
"""On a CPU: what a rank holds when it has imported torch, Megatron and transformers; measured."""
RUNTIME = 50_000_000
"""On a CPU: what the process grows by besides tensors (gloo, oneDNN, Python objects); measured."""
MALLOC = 0.07
"""On a CPU: share of the tensors' bytes that malloc holds on to besides, in holes left by freed
tensors. Fitted to measurements, where it was between 2% and 16%; 0 if every tensor had pages of its own.
"""


@dataclass(frozen=True)
class Part:
    """Some bytes of one process."""

    name: str
    nbytes: int
    basis: Basis
    phase: Phase = "always"
    """When they are held; the largest of the phases counts, on top of what is always held."""
    host: bool = False
    """In the machine's memory, though the policy lies on a GPU."""


@dataclass(frozen=True)
class RankMemory:
    """All of a trainer rank's parts."""

    stage: int
    publishes: bool
    """Data and context rank 0: the one whose weights go to the engines."""
    parameters: int
    """Number of parameters that it holds."""
    parts: tuple[Part, ...]

    def total(self, *phases: Phase) -> int:
        """Bytes of these phases on the device."""
        return sum(p.nbytes for p in self.parts if p.phase in phases and not p.host)

    @property
    def phases(self) -> dict[str, int]:
        """Bytes at the worst moment of each phase."""
        found = {p.phase: 0 for p in self.parts if p.phase != "always" and not p.host}
        return {phase: self.total("always", phase) for phase in found}

    @property
    def peak(self) -> int:
        """Most bytes on the device at a time."""
        return max(self.phases.values())

    @property
    def host(self) -> int:
        """Bytes in the machine's memory, where the policy lies on a GPU."""
        return sum(p.nbytes for p in self.parts if p.host)


def stage_shapes(layout: Layout, settings: Settings, stage: int) -> dict[str, tuple[int, ...]]:
    """Name and local shape of every parameter of a pipeline rank, all its virtual stages together."""
    parallel = settings.parallel
    stages = parallel.pipeline * parallel.virtual
    counts = layout.shape.stage_layers(stages)
    found: dict[str, tuple[int, ...]] = {}
    for virtual in range(parallel.virtual):
        number = virtual * parallel.pipeline + stage
        first = sum(counts[:number])
        found |= layout.stage_params(
            layers=range(first, first + counts[number]),
            first=number == 0,
            last=number == stages - 1,
            tensor=parallel.tensor,
            vocab_multiple=settings.model.vocab_multiple,
        )
    return found


def state_bytes(dtype: str, *, distributed: bool, replicas: int) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer state.

    Gradients are accumulated and reduced in float32, in a buffer of all of them on every rank. AdamW has two
    float32 moments (Schedule-Free AdamW a point and a moment); 16-bit weights have a float32 copy besides.
    The distributed optimizer cuts copy and moments over the replicas, data x context of them: 6 +
    12/replicas bytes in bfloat16, 18 without it.
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
    """Every part of one rank.

    lengths: of the sequences of its replica's largest micro-batch; microbatches: of one update.
    """
    parallel, dtype = settings.parallel, settings.precision.dtype
    w = widths(shape, parallel, dtype)
    tokens, replicas = -(-sum(lengths) // parallel.context), parallel.data * parallel.context
    shapes = {n: math.prod(s) for n, s in stage_shapes(layout_for(shape), settings, stage).items()}
    count, largest = sum(shapes.values()), max(shapes.values())
    weights, gradients, state = state_bytes(
        dtype, distributed=settings.optimizer.distributed, replicas=replicas
    )
    parts = [
        Part("parameters", round(weights * count), "exact"),
        Part("gradients", round(gradients * count), "exact"),
        Part("optimizer", round(state * count * (1 - settings.memory.offload_optimizer)), "exact"),
        *_offloaded_parts(settings, state * count),
        *_parked_parts(settings, state * count, device),
        *_bridge_parts(settings, round(weights * count), publishes=publishes, device=device),
    ]
    if settings.anchor.type != "old":
        parts.append(Part("held anchor", round(weights * count), "exact", host=device == "cuda"))

    last = stage == parallel.pipeline - 1
    recompute = recomputation(settings)
    activations = activation_bytes(settings, shape, stage, lengths, microbatches, recompute)
    logits = _logits_bytes(settings, shape, tokens) if last else 0
    rows = shape.padded_vocab(parallel.tensor, settings.model.vocab_multiple) // parallel.tensor
    output = rows * shape.hidden_size
    kept, whole = (layer_bytes(w, lengths, qk_norm=shape.qk_norm, recompute=r) for r in (recompute, "none"))
    working = round(working_bytes(w, tokens) + whole - kept)
    # The head's backward pass comes first, with everything saved; a layer's working set only after it.
    head = logits + output * (4 + (weights if weights < 4 else 0)) if last else 0
    parts += [
        Part("activations", activations, "estimated", "update"),
        Part("logits chunk, gradients in work", max(working, round(head)), "estimated", "update"),
        Part("a layer and a logits chunk", working + logits, "estimated", "log-probs"),
    ]
    if device == "cpu":
        # Our AdamW has two temporaries as large as the parameter, or its shard, that it is at; on a GPU the
        # fused optimizers have none.
        share = replicas if settings.optimizer.distributed else 1
        parts.append(Part("optimizer's temporaries", 2 * 4 * largest // share, "estimated", "optimizer"))
        if replicas > 1 and settings.optimizer.distributed:
            # gloo reduces and scatters in a copy of the whole buffer.
            parts.append(Part("copy of the gradients", 4 * count, "estimated", "reduce"))
        tensors = RankMemory(stage, publishes, count, tuple(parts)).peak
        parts.append(Part("malloc, libraries", RUNTIME + round(MALLOC * tensors), "estimated"))
    return RankMemory(stage, publishes, count, tuple(parts))


def _offloaded_parts(settings: Settings, state: float) -> list[Part]:
    """The share of the optimizer's state in host memory, and the float32 gradients copied there."""
    share = settings.memory.offload_optimizer
    if not share:
        return []
    # Whole tensors are moved until the share is reached. To 12 bytes of state come 4 of gradient.
    return [Part("optimizer off the GPU", round(share * state * 16 / 12), "estimated", host=True)]


def _parked_parts(settings: Settings, state: float, device: str) -> list[Part]:
    """Host memory in which the optimizer's state waits while engines have the card; it is kept once taken."""
    if not settings.engine.colocated:
        return []
    nbytes = round(state * (1 - settings.memory.offload_optimizer))
    return [Part("optimizer while engines sample", nbytes, "exact", host=device == "cuda")]


def recomputation(settings: Settings) -> Recompute:
    """What the policy recomputes with these settings."""
    return settings.memory.recompute_for(settings.tokens_at_once)


def activation_bytes(
    settings: Settings,
    shape: ModelShape,
    stage: int,
    lengths: Sequence[int],
    microbatches: int,
    recompute: Recompute,
) -> int:
    """Bytes that a rank saves of all micro-batches in flight."""
    parallel = settings.parallel
    w = widths(shape, parallel, settings.precision.dtype)
    layers = sum(shape.stage_layers(parallel.pipeline * parallel.virtual)[stage :: parallel.pipeline])
    chunks = in_flight(stage, parallel, microbatches) * layers / parallel.virtual
    saved = chunks * layer_bytes(w, lengths, qk_norm=shape.qk_norm, recompute=recompute)
    if stage == parallel.pipeline - 1:
        saved += sum(lengths) / parallel.context * head_bytes(w)
    return round(saved)


def _logits_bytes(settings: Settings, shape: ModelShape, tokens: int) -> int:
    """Chunked log-probs: the float32 logits and probabilities of a chunk."""
    chunk = settings.training.logprob_chunk
    rows = shape.padded_vocab(settings.parallel.tensor, settings.model.vocab_multiple)
    return 2 * 4 * min(chunk, tokens) * rows // settings.parallel.tensor


def _bridge_parts(settings: Settings, weights: int, *, publishes: bool, device: str) -> list[Part]:
    """What publishing the weights takes on a rank that publishes."""
    bridge, parallel, engine = settings.bridge, settings.parallel, settings.engine
    if not publishes or bridge.transport == "cuda_ipc":
        return []
    if bridge.transport == "process_group":
        # A worker shares its budget out over the ranks that send to it; each of them has as much for it.
        senders = parallel.tensor * parallel.pipeline
        buckets = bridge.bucket_mib * 1024**2 * engine.replicas * engine.tensor // senders
        host = device == "cuda" and engine.colocated
        return [Part("bridge: buckets", buckets, "estimated", host=host)]
    if device == "cpu" and not settings.optimizer.distributed:
        return [Part("bridge: parameters lie in shared memory", 0, "exact")]
    return [Part("bridge: copy in shared memory", weights, "exact", host=device == "cuda")]

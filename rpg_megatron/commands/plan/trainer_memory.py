"""Memory of a trainer rank, and host memory of rank 0's node, by part, in bytes.

``docs/evidence/plan.md`` gives the source of each number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rpg_megatron.commands.plan.activations import StageActivations
from rpg_megatron.commands.plan.layout import (
    BatchPlan,
    Gpus,
    RankParameters,
    expert_replicas,
    rank_parameters,
)
from rpg_megatron.config import ModelShape, Settings, read_model_shape
from rpg_megatron.config.lora import OUTPUT_LAYER
from rpg_megatron.config.rollout import BUCKET_BYTES
from rpg_megatron.system.dtypes import ITEM_BYTES

Phase = Literal["always", "update", "log-probs", "rollout", "sync"]
Basis = Literal["exact", "estimated"]

RESERVE = 3 * 1024**3
"""On a GPU: CUDA context, workspaces, fragmentation. Not measured; a rule of thumb."""
IMPORTS, SHARED, RUNTIME = 780_000_000, 330_000_000, 50_000_000
"""On a CPU: memory of a rank after importing torch, Megatron and transformers (712 MB with one kernel's pages
of files, 846 with another's); what of it the ranks of a run share, which are forks; and what gloo, oneDNN and
Python objects add; measured."""
FREED, FREED_OF_BATCH = 0.12, 0.5
"""On a CPU: allowance for freed memory that malloc keeps, per byte of tensors (measured: 2% to 29%), and with
frozen weights in addition per byte of a batch's tensors, which are most of what is freed (with the former 40%
to 70%)."""
TRAJECTORY, TOKEN = 1500, 25
"""Bytes of a trajectory in Python besides its tokens (measured), and of each token of a response: id and
weight version, int32; mask, bool; log-probs of engine, trainer and anchor, float32; text, assumed to be four
characters. Those of a prompt count as much, though most have an id alone."""
SAVE, NCCL, TEACHER = "checkpoint to be written", "NCCL buffers", "teacher"
SERVED, MERGED = "weights in bfloat16, for engines", "weights merged with adapters"
"""Names of parts: copies of parameters stored in FP8, and of those with adapters for engines without them."""


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory of a process, a GPU or a node."""

    name: str
    nbytes: int
    basis: Basis
    phase: Phase = "always"
    """When it is allocated; a peak is ``always`` plus the largest other phase."""
    host: bool = False
    """Whether it is in host memory while the policy is on a GPU."""


_Row = tuple[str, float, Basis, Phase, bool]
"""Name, bytes, basis, phase and whether in host memory, of a part; one without bytes is left out."""


def phase_peaks(parts: Iterable[MemoryPart]) -> dict[str, int]:
    """Peak bytes of each phase: what is always held, and its own parts."""
    nbytes: Counter[str] = Counter()
    for part in parts:
        nbytes[part.phase] += part.nbytes
    always = nbytes.pop("always", 0)
    return {phase: always + more for phase, more in nbytes.items()}


@dataclass(frozen=True)
class RankMemory:
    """The memory of a trainer rank."""

    stage: int
    publishes: bool
    """Whether it publishes weights to the engines: data and context rank 0."""
    parameters: int
    """Number of parameters on this rank."""
    trained: int
    """Of these, those that updates change."""
    parts: tuple[MemoryPart, ...]

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes of each phase, on the device."""
        return phase_peaks(part for part in self.parts if not part.host)

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return max(self.phases.values())

    @property
    def host(self) -> int:
        """Bytes in host memory, if the policy is on a GPU."""
        return sum(part.nbytes for part in self.parts if part.host)


def state_bytes(dtype: str) -> tuple[int, int, int]:
    """Bytes per parameter of weights, gradients and optimizer state (see ``RankParameters.owned``).

    Gradients are accumulated and reduced in float32, in a full buffer on every rank. AdamW has two float32
    moments (Schedule-Free AdamW a point and a moment); 16-bit weights also have a float32 copy.
    """
    item = ITEM_BYTES[dtype]
    return item, 4, 8 + (4 if item < 4 else 0)


def optimizer_bytes(settings: Settings, held: RankParameters) -> float:
    """Bytes of a rank's optimizer state; Muon has one moment of the layers' matrices."""
    each, muon = state_bytes(settings.precision.dtype)[2], settings.optimizer.type == "muon"
    return each * held.owned(settings) - 4 * muon * held.hidden


def communicator_bytes(
    size: int, here: int, *, peers: int = 0, collectives: bool = True, large: bool = False
) -> int:
    """NCCL's buffers of a communicator on an H100, from the sources of 2.29. Not measured.

    here: its ranks on a node; peers: ranks with which messages are exchanged; collectives: whether rings and,
    between nodes, trees are connected; large: whether all-reduces of megabytes go through the switch (NVLS).
    """
    here = max(1, min(size, here))
    several, channels = here > 1, min(16, 4 * here)
    if size == here:
        mib = 230.0 + 288 * collectives + 384 * peers + 256 * (large and here == 8)
    else:
        mib = 4 + 34 * several + 6 * channels + (32 * here + 640) * (large and several)
        mib += channels * (12 + 12 * several + 68 / here) * collectives
        mib += 48 * min(peers, here - 1) + 2 * channels * (here + 1) * (peers >= here)
    return round(mib * 1024**2) * (size > 1)


def communicators(activations: StageActivations) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number of ranks, distance of neighbours and use (``communicator_bytes``) of a rank's communicators."""
    settings, shape, stage = activations.settings, activations.shape, activations.stage
    parallel, whole = settings.parallel, not settings.optimizer.distributed
    tensor, context, stages, expert = parallel.tensor, parallel.context, parallel.pipeline, parallel.expert
    of_stage, of_experts = parallel.world // stages, expert * parallel.expert_tensor
    yield from [(parallel.world, 1, {})] * 2  # the second one is for the norm of the gradients
    yield parallel.data * context, tensor, {"large": whole}
    yield tensor, 1, {"large": not parallel.sequence}
    yield context, tensor, {"peers": context - 1 if shape.linear else min(2, context - 1) * activations.fused}
    yield stages, of_stage, {"peers": min(2, stages - 1)}
    if shape.tied_embeddings and stages > 1 and stage in (0, stages - 1):
        yield 2, of_stage * (stages - 1), {}
    if shape.experts is not None:  # messages, counts, expert tensor parallelism, gradients, auxiliary loss
        yield expert, parallel.expert_tensor, {"peers": expert - 1, "collectives": False}
        yield from [(of_experts, 1, {}), (parallel.expert_tensor, 1, {})]
        yield expert_replicas(parallel), of_experts, {"large": whole}
        if settings.training.router_aux_loss:
            yield from [(tensor * context, 1, {}), (parallel.data * context, tensor, {})]


def link_bytes(settings: Settings, gpus: Gpus) -> tuple[int, int]:
    """NCCL's buffers of a link (``process_group``) on a rank and on a worker, in a node or between two."""
    if settings.engine.colocated:  # gloo
        return 0, 0
    return (294 * 1024**2, 550 * 1024**2) if len(gpus.nodes) == 1 else (44 * 1024**2, 44 * 1024**2)


def readers(settings: Settings) -> int:
    """Most engine workers that read from one data- and context-parallel replica (``process_group``).

    Engine e reads from replica e modulo the number of replicas.
    """
    engine, replicas = settings.engine, settings.parallel.data * settings.parallel.context
    return -(-engine.replicas // replicas) * engine.tensor * (settings.bridge.transport == "process_group")


def rank_memory(activations: StageActivations, gpus: Gpus, *, publishes: bool) -> RankMemory:
    """The memory of one rank of a pipeline stage. publishes: see ``RankMemory``."""
    settings, stage, device = activations.settings, activations.stage, activations.device
    held = rank_parameters(settings, activations.shape, stage)
    table = [
        *_state_rows(activations, held, gpus, publishes=publishes),
        *_update_rows(activations, stage == settings.parallel.pipeline - 1),
    ]
    parts = [MemoryPart(name, round(n), basis, phase, host) for name, n, basis, phase, host in table if n]
    rank = RankMemory(stage, publishes, held.total, held.trained, tuple(parts))
    if device == "cuda":
        return rank
    freed = FREED * rank.peak
    if settings.lora is not None:
        freed += FREED_OF_BATCH * sum(part.nbytes for part in parts if part.phase == "update")
    malloc = MemoryPart("malloc, libraries", RUNTIME + round(freed), "estimated")
    return replace(rank, parts=(*parts, malloc))


def _state_rows(
    activations: StageActivations, held: RankParameters, gpus: Gpus, *, publishes: bool
) -> Iterator[_Row]:
    """All that does not depend on the batch: weights, gradients, optimizer, copies of them, and buffers."""
    settings, on_gpu = activations.settings, activations.device == "cuda"
    parallel, lora, fp8, engine = settings.parallel, settings.lora, settings.precision.fp8, settings.engine
    distributed, transport = settings.optimizer.distributed, settings.bridge.transport
    weights, gradients, _ = state_bytes(settings.precision.dtype)
    state, offloaded = optimizer_bytes(settings, held), settings.memory.offload_optimizer
    held_anchor = settings.anchor.type != "old"
    # One replica publishes the rest; the first ranks that hold an expert publish it.
    split = parallel.expert * parallel.expert_tensor > 1
    published = held.total if publishes else held.in_experts * split
    saved, merges = published, engine.replicas > 0 and not settings.serves_adapters
    if lora is not None:
        saved = held.trained * publishes
        published -= saved * (not settings.serves_adapters)
    # FP8 copies in both orientations, for forward and backward pass, beside the bfloat16 weights. With
    # fp8.parameters, the parameters are these, and the copy is bfloat16 for the engines. On Blackwell GPUs
    # recipes with one scale per tensor need one byte less.
    second = SERVED if fp8 is not None and fp8.parameters else "weights in FP8"
    # Complete tensors are moved until the share is reached; 12 bytes of state come with 4 of gradient.
    # While engines sample, all state is there, and its memory is not released in between.
    parked = offloaded * state * 16 / 12 * on_gpu + engine.colocated * state * (1 - offloaded)
    # A worker divides its bucket budget among its senders, each of which allocates the same for it.
    buckets = BUCKET_BYTES * readers(settings) // (parallel.tensor * parallel.pipeline)
    # On a CPU without the distributed optimizer parameters lie in shared memory themselves.
    copied = engine.replicas > 0 and transport == "shared_memory" and (on_gpu or distributed)
    # gloo's reduce-scatter copies the whole buffer, also that of experts that only this rank has. The
    # process still holds the memory of the backward pass then.
    reduced = not on_gpu and distributed and parallel.data * parallel.context > 1
    yield "parameters", weights * held.total, "exact", "always", False
    yield second, 2 * held.in_fp8 * (fp8 is not None and activations.fused), "estimated", "always", False
    yield "gradients", gradients * held.trained, "exact", "always", False
    yield "copy of the gradients", gradients * held.trained * reduced, "estimated", "update", False
    yield "optimizer", state * (1 - offloaded), "exact", "always", False
    yield "optimizer off the GPU", parked, "estimated", "always", on_gpu
    yield MERGED, weights * held.adapted * merges, "exact", "always", False
    yield "bridge: buckets", buckets, "estimated", "always", on_gpu and engine.colocated
    yield "bridge: copy in shared memory", weights * published * copied, "exact", "always", on_gpu
    yield "held anchor", weights * held.trained * held_anchor, "exact", "always", on_gpu
    here, used = gpus.nodes[0][0] if gpus.nodes else gpus.per_node, communicators(activations)
    nccl = sum(communicator_bytes(n, -(-here // apart), **use) for n, apart, use in used)
    nccl += readers(settings) * link_bytes(settings, gpus)[0]
    yield NCCL, nccl * on_gpu, "estimated", "always", False
    if settings.checkpoint.every is not None and (on_gpu or settings.checkpoint.asynchronous):
        # The optimizer state of all replicas, moments and float32 weights, is gathered on the first one
        # (Megatron's format ``fully_reshardable``) and copied, one buffer after another. To resume, each rank
        # reads all of it. If it is not distributed, float32 weights are the model's.
        kept = (weights * (1 + held_anchor) + (12 if weights < 4 or distributed else 8)) * saved
        gathered = max(16 * saved, 12 * held.trained) * (on_gpu and distributed)
        yield SAVE, max(kept, gathered), "estimated", "always", on_gpu


def _update_rows(activations: StageActivations, last: bool) -> Iterator[_Row]:
    """What depends on the batch: activations, the log-prob head, a layer's working memory; a teacher."""
    settings, shape, stage = activations.settings, activations.shape, activations.stage
    lora, on_gpu = settings.lora, activations.device == "cuda"
    recompute, item = settings.recompute, ITEM_BYTES[settings.precision.dtype]
    here, working, teacher_work = activations.tokens, activations.working(recompute), 0
    if settings.teacher is not None and settings.teacher.path is not None:
        other, plain = read_model_shape(settings.teacher.path), settings.model_copy(update={"lora": None})
        teacher_work = replace(activations, settings=plain, shape=other).working("none")
        nbytes = item * rank_parameters(plain, other, stage).total
        full = last and settings.full_divergence is not None  # hidden states of a step; pinned: up to twice
        output_layer = item * other.hidden_size * _head_rows(settings, other) * (full and on_gpu)
        hidden = (1 + on_gpu) * item * activations.batch.microbatches * here * other.hidden_size * full
        yield TEACHER, nbytes, "exact", "always", on_gpu
        yield "teacher, to score", nbytes * on_gpu, "exact", "log-probs", False
        yield "teacher's output layer", output_layer, "exact", "update", False
        yield "teacher's hidden states", hidden * settings.minibatches, "estimated", "update", on_gpu
    rows = _head_rows(settings, shape) * last
    # Chunked log-probs: float32 logits and probabilities. The backward pass of the head runs first, with all
    # activations saved; a layer's working set comes after it.
    logits = 2 * 4 * min(settings.training.logprob_chunk, here) * rows
    logits = logits * 3 // 2 if settings.full_divergence is not None else logits
    # Columns of the output layer's matrix that has a gradient.
    columns = shape.hidden_size if lora is None else lora.rank * (OUTPUT_LAYER in lora.names)
    head = logits + rows * columns * (4 + (item if item < 4 else 0))
    scored = max(working, teacher_work) + logits
    yield "activations", activations.saved(recompute), "estimated", "update", False
    yield "logits chunk, transient gradients", max(working, head), "estimated", "update", False
    yield "a layer and a logits chunk", scored, "estimated", "log-probs", False


def _head_rows(settings: Settings, shape: ModelShape) -> int:
    """Rows of the output layer on a rank."""
    tensor = settings.parallel.tensor
    return shape.padded_vocab(tensor, settings.model.vocab_multiple) // tensor


def host_memory(
    settings: Settings,
    shape: ModelShape,
    batch: BatchPlan,
    ranks: Sequence[RankMemory],
    gpus: Gpus,
    *,
    on_gpu: bool,
    asleep: int = 0,
) -> tuple[MemoryPart, ...]:
    """Host memory of rank 0's node: what its ranks keep there, if they are on GPUs, and the step.

    ranks: one of each kind. The sampler's workers are on this node too, and hold the whole step until the
    leaders have fetched their parts, with ``rollout.ahead`` also the steps sampled ahead. All sequences count
    at their maximum length, with the routes that are replayed. asleep: bytes that a sleeping engine worker
    keeps there. Does not include libraries, engine processes and page cache.
    """
    parallel, e = settings.parallel, shape.experts
    here, workers, kept = parallel.world, 0, 0
    if on_gpu:
        fewest = min(gpus.per_node, parallel.world), min(gpus.per_node, gpus.engines)
        here, workers = gpus.nodes[0] if gpus.nodes else fewest
        kinds = {(rank.stage, rank.publishes): rank.host for rank in ranks}
        for number in range(here):  # Megatron numbers ranks tensor, context, data, pipeline
            replica = number // parallel.tensor % (parallel.context * parallel.data)
            kept += kinds[number // (parallel.world // parallel.pipeline), replica == 0]
    token = TOKEN
    if e is not None and settings.training.router_replay != "off":
        token += len(e.layers) * e.per_token * (1 if e.count <= 256 else 2)
    step = batch.sequences * (TRAJECTORY + batch.longest * token)
    # The ranks of a replica on a pipeline stage follow each other; the first of them is the leader, and has
    # its share twice while it sends it to the others.
    leaders = min(-(-here // (parallel.tensor * parallel.context)), parallel.data)
    shares = (1 + (parallel.world > parallel.data)) * step * leaders // parallel.data
    steps = 1 + settings.rollout.ahead
    table = {
        f"of {here} rank{'s' * (here > 1)}": kept,
        f"of sleeping engines, {workers} worker{'s' * (workers > 1)}": workers * asleep,
        f"{f'{steps} steps' if steps > 1 else 'the step'}: sampler, {leaders} "
        f"leader{'s' * (leaders > 1)}": steps * step + shares,
    }
    return tuple(MemoryPart(name, n, "estimated", host=True) for name, n in table.items() if n)

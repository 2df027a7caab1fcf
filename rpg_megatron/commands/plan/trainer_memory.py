"""Memory of a trainer rank, and host memory of rank 0's node, by part, in bytes.

``docs/plan.md`` gives the source of each number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.activations import Device, Recompute, StageActivations
from rpg_megatron.commands.plan.layout import (
    GPUS_PER_NODE,
    BatchPlan,
    Gpus,
    RankParameters,
    engines_of_a_replica,
    rank_parameters,
)
from rpg_megatron.config import ModelShape, Settings, read_model_shape
from rpg_megatron.config.lora import OUTPUT_LAYER
from rpg_megatron.config.rollout import BUCKET_BYTES
from rpg_megatron.system.dtypes import ITEM_BYTES

Phase = Literal["always", "update", "log-probs", "rollout"]
Basis = Literal["exact", "estimated"]

RESERVE = 3 * 1024**3
"""On a GPU: CUDA context, workspaces, fragmentation. Not measured; a rule of thumb."""
IMPORTS = 712_000_000
"""On a CPU: memory of a rank after importing torch, Megatron and transformers; measured."""
RUNTIME = 50_000_000
"""On a CPU: further memory besides tensors (gloo, oneDNN, Python objects); measured."""
FREED = 0.12
"""On a CPU: allowance for freed memory that malloc keeps, per byte of tensors; measured: 2% to 29%."""
FREED_OF_BATCH = 0.5
"""With frozen weights in addition, per byte of a batch's tensors, which are most of what is freed; measured:
with FREED 40% to 70%."""

_TRAJECTORY = 1500
"""Bytes of a trajectory in Python besides its tokens: the object, seven arrays, strings; measured."""
_PROMPT = 4
"""Bytes of a prompt's token: int32."""
_RESPONSE = 25
"""Bytes of a response's token: id and weight version, int32; mask, bool; log-probs of engine, trainer and
anchor, float32; text, assumed to be four characters."""
_SCORES = 8
"""Bytes of these for the log-probs of trainer and anchor."""
_SENT_TOKEN = 8
"""Bytes of a token sent to a rank (``training.batch_scatter``): id and the engine's log-prob."""
_SENT_TRAJECTORY = 28
"""Bytes of a sent trajectory besides its tokens: six int32 and the advantage."""

FP8_WEIGHTS = "weights in FP8"
"""Name of a part: rebuilt after engines used the GPU."""
BUCKET = 40_000_000
"""Elements of a bucket of Megatron's DDP, if it overlaps and has up to 40 replicas."""
SAVE = "checkpoint to be written"
"""Name of a part: the copy of weights and optimizer state that a save writes in the background."""
NCCL = "NCCL buffers"
"""Name of a part: see ``nccl_memory.py``."""
TEACHER = "teacher"
"""Name of a part: its weights."""
SERVED = "weights in bfloat16, for engines"
"""Name of a part: copy of parameters stored in FP8."""
MERGED = "weights merged with adapters"
"""Name of a part: for engines that do not apply adapters themselves."""


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
        on_device = [part for part in self.parts if not part.host]
        always = sum(part.nbytes for part in on_device if part.phase == "always")
        peaks: dict[str, int] = {}
        for part in on_device:
            if part.phase != "always":
                peaks[part.phase] = peaks.get(part.phase, always) + part.nbytes
        return peaks

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return max(self.phases.values())

    @property
    def host(self) -> int:
        """Bytes in host memory, if the policy is on a GPU."""
        return sum(part.nbytes for part in self.parts if part.host)


def state_bytes(dtype: str, *, distributed: bool, replicas: float) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer state.

    Gradients are accumulated and reduced in float32, in a full buffer on every rank. AdamW has two float32
    moments (Schedule-Free AdamW a point and a moment); 16-bit weights also have a float32 copy. The
    distributed optimizer shards copy and moments over the data x context replicas: 6 + 12/replicas bytes in
    bfloat16, 18 without it.
    """
    item = ITEM_BYTES[dtype]
    state = 8 + (4 if item < 4 else 0)
    return item, 4, state / (replicas if distributed else 1)


def recomputation(settings: Settings) -> Recompute:
    """The recomputation mode of these settings."""
    return settings.memory.recompute_for(settings.tokens_at_once)


def rank_memory(
    settings: Settings,
    shape: ModelShape,
    *,
    stage: int,
    publishes: bool,
    tokens: int,
    microbatches: int,
    device: Device,
    nccl: int = 0,
) -> RankMemory:
    """The memory of one rank. tokens: of its replica's largest micro-batch; microbatches: per update; nccl:
    bytes of NCCL's buffers.
    """
    parallel, lora, on_gpu = settings.parallel, settings.lora, device == "cuda"
    activations = StageActivations(settings, shape, stage, tokens, microbatches, device)
    held = rank_parameters(settings, shape, stage)
    # One replica publishes the rest; the first ranks that hold an expert publish it.
    split = parallel.expert * parallel.expert_tensor > 1
    experts = held.in_experts if split else 0
    published = held.total if publishes else experts
    saved = published
    if lora is not None:
        saved = held.trained if publishes else 0
        if publishes and not settings.serves_adapters:
            published -= held.trained
    weights, gradients, each = state_bytes(settings.precision.dtype, distributed=False, replicas=1)
    state = each * held.owned(settings)
    offloaded, fp8 = settings.memory.offload_optimizer, settings.precision.fp8
    parts = [MemoryPart("parameters", round(weights * held.total), "exact")]
    if fp8 is not None and activations.fused:
        # FP8 copies in both orientations, for forward and backward pass, beside the bfloat16 weights. With
        # fp8.parameters, the parameters are these, and the copy is bfloat16 for the engines. On Blackwell
        # GPUs recipes with one scale per tensor need one byte less.
        parts.append(MemoryPart(SERVED if fp8.parameters else FP8_WEIGHTS, 2 * held.in_fp8, "estimated"))
    parts += [
        MemoryPart("gradients", round(gradients * held.trained), "exact"),
        MemoryPart("optimizer", round(state * (1 - offloaded)), "exact"),
    ]
    if offloaded:
        # Complete tensors are moved until the share is reached; 12 bytes of state come with 4 of gradient.
        moved = round(offloaded * state * 16 / 12)
        parts.append(MemoryPart("optimizer off the GPU", moved, "estimated", host=True))
    if settings.engine.colocated:  # not released in between
        slept = round(state * (1 - offloaded))
        parts.append(MemoryPart("optimizer while engines sample", slept, "exact", host=on_gpu))
    if settings.engine.replicas:
        if lora is not None and not settings.serves_adapters:
            parts.append(MemoryPart(MERGED, round(weights * held.adapted), "exact"))
        parts += _bridge_parts(settings, round(weights * published), on_gpu=on_gpu)
    if settings.anchor.type != "old":
        parts.append(MemoryPart("held anchor", round(weights * held.trained), "exact", host=on_gpu))
    teacher_work = kept_rows = 0
    if settings.teacher is not None and settings.teacher.path is not None:
        other, plain = read_model_shape(settings.teacher.path), settings.model_copy(update={"lora": None})
        nbytes = round(weights * rank_parameters(plain, other, stage).total)
        parts.append(MemoryPart(TEACHER, nbytes, "exact", host=on_gpu))
        if on_gpu:
            parts.append(MemoryPart("teacher, to score", nbytes, "exact", "log-probs"))
        scored = StageActivations(plain, other, stage, tokens, microbatches, device)
        teacher_work = scored.working("none")
        if settings.full_divergence is not None and stage == parallel.pipeline - 1:
            # Its last hidden states, of all micro-batches of an update, and its output layer.
            kept_rows = round(weights * microbatches * -(-tokens // parallel.context) * other.hidden_size)
            rows = other.padded_vocab(parallel.tensor, settings.model.vocab_multiple) // parallel.tensor
            if on_gpu:
                head_bytes = round(weights * rows * other.hidden_size)
                parts.append(MemoryPart("teacher's output layer", head_bytes, "exact", "update"))
    if settings.checkpoint.every is not None and (on_gpu or settings.checkpoint.asynchronous):
        kept, most = _saved(settings, held, saved)
        parts.append(MemoryPart(SAVE, kept, "exact", host=on_gpu))
        if on_gpu and most > kept:
            parts.append(MemoryPart("checkpoint gathered or read", most - kept, "estimated", host=True))

    if nccl:
        parts.append(MemoryPart(NCCL, nccl, "estimated"))

    recompute, logits, head = recomputation(settings), 0, 0
    if stage == parallel.pipeline - 1:
        rows = shape.padded_vocab(parallel.tensor, settings.model.vocab_multiple) // parallel.tensor
        here = -(-tokens // parallel.context)
        # Chunked log-probs: float32 logits and probabilities. The backward pass of the head runs first, with
        # all activations saved; a layer's working set comes after it.
        logits = 2 * 4 * min(settings.training.logprob_chunk, here) * rows
        if settings.full_divergence is not None:
            logits = logits * 3 // 2
        head = logits
        columns = shape.hidden_size  # of the matrix that has a gradient
        if lora is not None:
            columns = lora.rank * (OUTPUT_LAYER in lora.names)
        head += round(rows * columns * (4 + (weights if weights < 4 else 0)))
    working = activations.working(recompute)
    parts += [
        MemoryPart("activations", activations.saved(recompute), "estimated", "update"),
        MemoryPart("logits chunk, gradients in work", max(working, head), "estimated", "update"),
        MemoryPart(
            "a layer and a logits chunk", max(working, teacher_work) + logits, "estimated", "log-probs"
        ),
    ]
    if kept_rows:
        parts.append(MemoryPart("teacher's hidden states", kept_rows, "estimated", "update", host=on_gpu))
    if not on_gpu:
        if parallel.data * parallel.context > 1 and settings.optimizer.distributed:
            # gloo's reduce-scatter copies the whole buffer, also that of experts that only this rank has. The
            # process still holds the memory of the backward pass then.
            parts.append(MemoryPart("copy of the gradients", 4 * held.trained, "estimated", "update"))
        tensors = RankMemory(stage, publishes, held.total, held.trained, tuple(parts)).peak
        freed = FREED * tensors
        if lora is not None:
            freed += FREED_OF_BATCH * sum(part.nbytes for part in parts if part.phase == "update")
        parts.append(MemoryPart("malloc, libraries", RUNTIME + round(freed), "estimated"))
    return RankMemory(stage, publishes, held.total, held.trained, tuple(parts))


def _saved(settings: Settings, held: RankParameters, written: int) -> tuple[int, int]:
    """Bytes in host memory of the copy that a save writes, and of the most that save or resume has at once.

    written: trained parameters of which this rank has the first replica, which alone is. Their optimizer
    state, moments and float32 weights, is gathered there if it is distributed (Megatron's format
    ``fully_reshardable``). If it is not, float32 weights are the model's.
    """
    item, distributed = ITEM_BYTES[settings.precision.dtype], settings.optimizer.distributed
    state = 12 if item < 4 or distributed else 8
    kept = (item * (1 if settings.anchor.type == "old" else 2) + state) * written
    if not distributed:
        return kept, kept
    # Gathering: three buffers of 4 bytes, and of one of DDP's buckets every rank's share, what was received
    # and both together. Then the buffers are copied, one after another. To resume, each rank reads all three.
    bucket = min(BUCKET, held.trained) if settings.optimizer.overlap else held.trained
    share = round(12 * bucket * held.owned(settings) / held.trained) if held.trained else 0
    most = max(12 * written + (8 * bucket if written else 0) + share, 16 * written)
    return kept, max(kept, most, 12 * held.trained)


def _bridge_parts(settings: Settings, published: int, *, on_gpu: bool) -> list[MemoryPart]:
    """Memory for publishing weights. published: bytes that this rank sends if one replica publishes.

    With ``process_group`` all ranks send.
    """
    bridge, parallel, engine = settings.bridge, settings.parallel, settings.engine
    if bridge.transport == "process_group":
        # A worker divides its bucket budget among its senders, each of which allocates the same for it.
        workers = engines_of_a_replica(engine.replicas, parallel) * engine.tensor
        buckets = BUCKET_BYTES * workers // (parallel.tensor * parallel.pipeline)
        return [MemoryPart("bridge: buckets", buckets, "estimated", host=on_gpu and engine.colocated)]
    if not published or bridge.transport == "cuda_ipc":
        return []
    if not on_gpu and not settings.optimizer.distributed:
        return [MemoryPart("bridge: parameters lie in shared memory", 0, "exact")]
    return [MemoryPart("bridge: copy in shared memory", published, "exact", host=on_gpu)]


def batch_bytes(trajectories: int, prompt_tokens: int, response_tokens: int, *, scored: bool = True) -> int:
    """Bytes of trajectories on a leader, or in a sampler worker.

    prompt_tokens, response_tokens: totals. scored: whether they have the trainer's log-probs (on a leader).
    """
    each = _RESPONSE if scored else _RESPONSE - _SCORES
    return trajectories * _TRAJECTORY + prompt_tokens * _PROMPT + response_tokens * each


def broadcast_bytes(trajectories: int, tokens: int, data: int) -> int:
    """Additional bytes on a leader while it broadcasts its part, one of ``data``, within its replica.

    trajectories, tokens (with prompts): of the whole step.
    """
    return -(-trajectories // data) * _SENT_TRAJECTORY + -(-tokens // data) * _SENT_TOKEN


def route_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of a token's routes, which are replayed; 0 if none are."""
    if shape.experts is None or settings.training.router_replay == "off":
        return 0
    return len(shape.experts.layers) * shape.experts.per_token * (1 if shape.experts.count <= 256 else 2)


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
    at their maximum length. asleep: bytes that a sleeping engine worker keeps there. Does not
    include libraries, engine processes and page cache.
    """
    parallel = settings.parallel
    here = parallel.world
    nbytes: Counter[str] = Counter()
    if on_gpu:
        here = gpus.nodes[0][0] if gpus.nodes else min(GPUS_PER_NODE, parallel.world)
        of_ranks = f", {here} rank{'s' if here > 1 else ''}"
        kinds = {(rank.stage, rank.publishes): rank for rank in ranks}
        for number in range(here):  # Megatron numbers ranks tensor, context, data, pipeline
            replica, stage = number // parallel.tensor, number // (parallel.world // parallel.pipeline)
            publishes = replica % (parallel.context * parallel.data) == 0
            for part in kinds[stage, publishes].parts:
                if part.host:
                    nbytes[part.name + of_ranks] += part.nbytes
        if asleep:
            workers = gpus.nodes[0][1] if gpus.nodes else min(GPUS_PER_NODE, gpus.engines)
            nbytes[f"weights of sleeping engines, {workers} worker{'s' if workers > 1 else ''}"] = (
                workers * asleep
            )
    sequences, steps = batch.sequences, 1 + settings.rollout.ahead
    response = batch.longest
    if settings.sft is None:
        response = min(settings.rollout.max_response_tokens, response)
    tokens = sequences * (batch.longest - response), sequences * response
    # The ranks of a replica on a pipeline stage follow each other; the first of them is the leader.
    leaders = min(-(-here // (parallel.tensor * parallel.context)), parallel.data)
    sampled = steps * batch_bytes(sequences, *tokens, scored=False)
    held = batch_bytes(sequences, *tokens) * leaders // parallel.data
    nbytes[f"{steps} steps, in the sampler" if steps > 1 else "the step, in the sampler"] = sampled
    nbytes[f"shares of it, {leaders} of {parallel.data} leaders"] = held
    if routes := route_bytes(settings, shape) * sum(tokens):
        nbytes["routes, in the sampler and the leaders"] = steps * routes + routes * leaders // parallel.data
    if parallel.world > parallel.data:
        sent = broadcast_bytes(sequences, sequences * batch.longest, parallel.data) + routes // parallel.data
        nbytes["shares in transfer to other ranks"] = leaders * sent
    return tuple(MemoryPart(name, size, "estimated", host=True) for name, size in nbytes.items())

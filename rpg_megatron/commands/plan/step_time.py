"""Seconds of each phase of a step, computed from stated assumptions. Nothing here was measured on a GPU.

Notation: P parameters in matrix products (without the input embedding), n tokens of a sequence, L layers,
b bytes of a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.assumptions import Assumptions
from rpg_megatron.commands.plan.experts import (
    dispatched_bytes,
    expert_replicas,
    read_columns,
)
from rpg_megatron.commands.plan.fused_activations import in_fp8
from rpg_megatron.commands.plan.gpu_count import GPUS_PER_NODE
from rpg_megatron.commands.plan.parameters import rank_parameters
from rpg_megatron.commands.plan.plan import Plan
from rpg_megatron.commands.plan.trainer_memory import engines_of_a_replica, recomputation, state_bytes
from rpg_megatron.config import Settings
from rpg_megatron.system.dtypes import ITEM_BYTES

Name = Literal["rollout", "rollout: tail", "log-probs", "update", "sync", "handover", "other"]
Placement = Literal["colocated", "by turns", "overlapped"]

_OPTIMIZER = 30
"""Bytes that AdamW reads and writes for each parameter that a rank updates: gradient and, in float32, weight
and two moments, read and written; the bfloat16 weight is written."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step."""

    name: Name
    seconds: float
    bound: str
    """What limits its speed."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step with one placement of trainers and engines."""

    placement: Placement
    trainer_gpus: float
    engine_gpus: float
    phases: tuple[Phase, ...]
    tokens: float
    """Prompt and response tokens that a step trains on."""
    drained: bool = False
    """Overlapped: a batch is finished before new weights are loaded (rollout.inflight drain)."""

    def seconds(self, *names: Name) -> float:
        """Seconds of these phases."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)

    @property
    def step(self) -> float:
        """Seconds of a step: phases in turn, or rollouts beside log-probs and updates."""
        if self.placement != "overlapped":
            return sum(phase.seconds for phase in self.phases)
        return max(self.generation, self.training) + self.seconds("sync", "other")

    @property
    def generation(self) -> float:
        """Seconds in which the engines sample a batch."""
        # Overlapped, the next batch's responses fill the engines during the tail of this one.
        if self.placement == "overlapped" and not self.drained:
            return self.seconds("rollout")
        return self.seconds("rollout", "rollout: tail")

    @property
    def training(self) -> float:
        """Seconds in which the trainer computes."""
        return self.seconds("log-probs", "update")

    @property
    def gpus(self) -> float:
        """GPUs of all processes."""
        return self.trainer_gpus + (0 if self.placement == "colocated" else self.engine_gpus)

    @property
    def trainer_idle(self) -> float:
        """Fraction of the step in which trainer GPUs neither compute nor send; colocated: nor sample."""
        busy: tuple[Name, ...] = ("log-probs", "update", "sync")
        return 1 - self.seconds(*busy, *(("rollout",) if self.placement == "colocated" else ())) / self.step

    @property
    def engine_idle(self) -> float:
        """Fraction of the step in which engine GPUs neither sample nor receive; the tail counts as idle."""
        if self.placement == "colocated":
            return self.trainer_idle
        return 1 - self.seconds("rollout", "sync") / self.step


def step_times(plan: Plan, a: Assumptions) -> tuple[StepTime, ...]:
    """The step with the placement of the settings, then with the other two placements.

    Without ``rollout.ahead``, trainer and engines on separate GPUs take turns; with it they overlap. Other
    placements have the same total number of GPUs; data-parallel ranks and engines are scaled, possibly to
    fractions, and memory is not checked.
    """
    trainer, engines, colocated = plan.gpus.trainer, plan.gpus.engines, plan.gpus.colocated
    total = max(trainer, engines) if colocated else trainer + engines
    separate = (total * a.trainer_share, total * (1 - a.trainer_share)) if colocated else (trainer, engines)
    placements: list[tuple[Placement, float, float]] = [
        ("colocated", *((trainer, engines) if colocated else (total, total))),
        ("by turns", *separate),
        ("overlapped", *separate),
    ]
    own: Placement = "colocated" if colocated else "overlapped" if plan.settings.rollout.ahead else "by turns"
    placements.sort(key=lambda placement: placement[0] != own)
    return tuple(_step(plan, a, *placement) for placement in placements)


def _step(plan: Plan, a: Assumptions, placement: Placement, trainer: float, engines: float) -> StepTime:
    settings, sampled = plan.settings, _Lengths.of(plan, a)
    data = settings.parallel.data * trainer / settings.parallel.world
    replicas = engines / settings.engine.tensor
    shared = placement == "colocated"
    phases = [
        *_rollout(plan, a, sampled, replicas),
        _log_probs(plan, a, sampled, data),
        _update(plan, a, sampled, data),
        _sync(plan, a, replicas, data, shared=shared),
        *([_handover(plan, a, data)] if shared else []),
        Phase("other", a.step_overhead, "fixed"),
    ]
    tokens = plan.batch.sequences * sampled.mean
    drained = placement == "overlapped" and settings.rollout.inflight == "drain"
    return StepTime(placement, trainer, engines, tuple(phases), tokens, drained)


@dataclass(frozen=True)
class _Lengths:
    """Tokens of prompts, responses, and both together."""

    prompt: float
    response: float
    longest_response: int
    mean: float
    square: float
    """Mean of the squared length of prompt and response."""
    longest: float

    @classmethod
    def of(cls, plan: Plan, a: Assumptions) -> _Lengths:
        limit = plan.settings.rollout.max_response_tokens
        prompt = a.prompt_mean * plan.settings.data.max_prompt_tokens
        response = a.response_mean * limit
        mean, longest = prompt + response, prompt + limit
        # The variance of numbers between 0 and the limit with this mean is at most response x (limit - it).
        variance = min((a.length_spread * response) ** 2, response * (limit - response))
        return cls(prompt, response, limit, mean, mean**2 + variance, longest)


def _pass_seconds(
    plan: Plan, a: Assumptions, tokens: float, squares: float, *, layers: float, mlp: float, head: float
) -> float:
    """Seconds of one GPU at its peak for passes over sequences with these sums of n and n^2.

    A forward pass takes 2 P n for products with weights (Kaplan et al. 2020, arXiv 2001.08361, 2.1) and
    2 n^2 heads head_dim L for causal attention, half of 4 n^2 (Narayanan et al. 2021, arXiv 2104.04473,
    appendix). A backward pass takes twice that. layers, mlp, head: number of passes, a backward pass as two;
    mlp: additional ones of the MLPs alone.
    """
    shape, settings = plan.shape, plan.settings
    in_layers, in_head = shape.matmul_parameters
    in_mlp = 3 * shape.hidden_size * shape.active_ffn_columns
    quantised = sum(in_fp8(settings.precision.fp8, n, shape.num_layers) for n in range(shape.num_layers))
    share = quantised / shape.num_layers
    peak = a.peak_fp32 if settings.precision.dtype == "float32" else a.peak_bf16
    linear = 2 * tokens * (layers * in_layers + mlp * in_mlp)
    attention = 2 * squares * layers * shape.num_heads * shape.head_dim * shape.num_layers
    output = 2 * tokens * head * in_head
    return linear * (share / a.peak_fp8 + (1 - share) / peak) + (attention + output) / peak


def _replica_work(lengths: _Lengths, sequences: float, data: float) -> tuple[float, float]:
    """Sums of n and n^2 on a data-parallel replica: its part, but at least one longest sequence."""
    each = sequences / data
    return max(each * lengths.mean, lengths.longest), max(each * lengths.square, lengths.longest**2)


def _bubble(settings: Settings, tokens: float) -> float:
    """Pipeline time over that of its work: 1 + (p - 1) / (v m) (arXiv 2104.04473, 2.2)."""
    microbatches = max(1, math.ceil(tokens / settings.training.tokens_per_microbatch))
    return 1 + (settings.parallel.pipeline - 1) / settings.parallel.virtual / microbatches


def _rollout(plan: Plan, a: Assumptions, lengths: _Lengths, replicas: float) -> list[Phase]:
    """Prefill, decoding at the batch that fits, and the tail.

    A decoding step of batch B takes the longer of two times, plus overheads: reading the weights and the
    batch's keys and values, and computing 2 P B FLOPs (Pope et al. 2022, arXiv 2211.05102, 2.1). All
    responses are decoded at batch B; then the longest one continues alone, from the mean to the maximum
    length. Prompts are prefilled once per group (prefix caching).
    """
    settings, engine, shape = plan.settings, plan.settings.engine, plan.shape
    rollout = settings.rollout
    prompts = rollout.prompts_per_step / (a.kept_groups if rollout.dynamic is not None else 1)
    sequences = max(1.0, prompts * rollout.samples_per_prompt / replicas)  # of an engine
    in_layers, in_head = shape.matmul_parameters
    item = ITEM_BYTES[settings.precision.dtype]
    fp8 = engine.quantization == "fp8"
    one = 1 if fp8 else item
    peak = a.peak_fp8 if fp8 else a.peak_fp32 if item == 4 else a.peak_bf16
    bandwidth = a.memory_bandwidth * a.decode_efficiency
    fixed = a.decode_overhead
    if engine.tensor > 1:
        fixed += 2 * shape.num_layers * a.allreduce_latency

    def token(batch: float, context: float) -> tuple[float, float]:
        """Seconds to read and to compute in one decoding step."""
        flops = 2 * (in_layers + in_head) * batch / engine.tensor
        idle = 3 * shape.hidden_size * (read_columns(shape, batch) - shape.active_ffn_columns)
        weights = ((in_layers + idle) * one + in_head * item) / engine.tensor
        read = weights + batch * context * plan.engine.kv_bytes_per_token
        return read / bandwidth, flops / (peak * a.prefill_mfu)

    context = lengths.prompt + lengths.response / 2
    batch = max(1.0, min(engine.max_sequences, sequences, plan.engine.kv_tokens / context))
    read, computed = token(batch, context)
    seconds = sequences * lengths.response / batch * (max(read, computed) + fixed)
    whole = 2 * (in_layers + in_head) * lengths.prompt
    whole += 2 * lengths.prompt**2 * shape.num_heads * shape.head_dim * shape.num_layers
    prefill = prompts / replicas * whole / (engine.tensor * peak * a.prefill_mfu)
    parts = {
        "memory bandwidth": read if read >= computed else 0,
        "FLOP/s": computed if computed > read else 0,
        "overheads": fixed,
    }
    bound = max(parts, key=lambda name: parts[name])
    bound = "prefill" if prefill > seconds else f"{bound}, {batch:.0f} at once"
    left = lengths.longest_response - lengths.response
    alone = max(token(1, lengths.prompt + lengths.response + left / 2)) + fixed
    return [
        Phase("rollout", seconds + prefill, bound),
        Phase("rollout: tail", left * alone, "one response alone"),
    ]


def _log_probs(plan: Plan, a: Assumptions, lengths: _Lengths, data: float) -> Phase:
    """A forward pass for ``old``, and one for a held anchor, whose weights are swapped in and out."""
    settings, parallel = plan.settings, plan.settings.parallel
    passes = 1 if settings.anchor.type == "old" else 2
    tokens, squares = _replica_work(lengths, plan.batch.sequences, data)
    gpus = parallel.world / parallel.data
    one = _pass_seconds(plan, a, tokens, squares, layers=1, mlp=0, head=1) / (a.score_mfu * gpus)
    routed = _dispatch_seconds(plan, a, tokens)
    seconds = passes * (one + routed) * _bubble(settings, tokens)
    if passes == 2:
        weights = ITEM_BYTES[settings.precision.dtype] * plan.largest.parameters
        seconds += 4 * weights / (a.host_link * a.link_efficiency)  # twice, in both directions
    bound = "FLOP/s" if one >= routed else "exchange of tokens"
    return Phase("log-probs", seconds, f"{bound}, {passes} pass{'es' if passes > 1 else ''}")


def _dispatch_seconds(plan: Plan, a: Assumptions, tokens: float) -> float:
    """Seconds of a forward pass in which expert-parallel ranks exchange tokens; 0 for a dense model.

    tokens: those of a replica. Assumes even load, no overlap, rows to other nodes limited by the network, and
    rows within a node limited by NVLink.
    """
    parallel = plan.settings.parallel
    nbytes = dispatched_bytes(plan.shape, parallel, ITEM_BYTES[plan.settings.precision.dtype])
    if not nbytes:
        return 0.0
    each = tokens * nbytes * parallel.data / parallel.world
    group = parallel.expert * parallel.expert_tensor
    far = max(0.0, 1 - GPUS_PER_NODE / group) / (1 - 1 / parallel.expert)
    return each * max(far / a.network, (1 - far) / a.nvlink) / a.link_efficiency


def _replicated(plan: Plan, data: float) -> list[tuple[int, float]]:
    """Parameters of the largest rank outside and inside experts, each with the number of replicas."""
    settings, parallel = plan.settings, plan.settings.parallel
    mine = rank_parameters(plan.shape, parallel, plan.largest.stage, settings.model.vocab_multiple)
    of_experts = expert_replicas(parallel) * data / parallel.data
    return [
        (mine.total - mine.in_experts, max(1.0, data * parallel.context)),
        (mine.in_experts, max(1.0, of_experts)),
    ]


def _update(plan: Plan, a: Assumptions, lengths: _Lengths, data: float) -> Phase:
    """All updates of a step: forward, backward, recomputation, reduction of gradients, optimizer.

    The log-prob head is always recomputed in the backward pass. The reduction transfers a float32 gradient
    and the new weight of each parameter in a ring; with optimizer.overlap only the time beyond that of a
    micro-batch counts. Communication of tensor and context parallelism is part of ``train_mfu``; the exchange
    of tokens between expert-parallel ranks is not.
    """
    settings, parallel, updates = plan.settings, plan.settings.parallel, plan.batch.updates
    tokens, squares = _replica_work(lengths, plan.batch.sequences_per_update, data)
    again = recomputation(settings)
    gpus = parallel.world / parallel.data
    work = _pass_seconds(
        plan,
        a,
        tokens,
        squares,
        layers=3 + (again == "full"),
        mlp=again == "selective",
        head=4,
    ) / (a.train_mfu * gpus)
    routed = (2 + (again != "none")) * _dispatch_seconds(plan, a, tokens)
    bubble = _bubble(settings, tokens)
    groups = _replicated(plan, data)
    link = a.nvlink if parallel.tensor * data * parallel.context <= GPUS_PER_NODE else a.network
    moved = sum((4 + ITEM_BYTES[settings.precision.dtype]) * n * (1 - 1 / shards) for n, shards in groups)
    reduction = moved / (link * a.link_efficiency)
    if settings.optimizer.overlap:
        reduction = max(
            0.0,
            reduction - (work + routed) / max(1, math.ceil(tokens / settings.training.tokens_per_microbatch)),
        )
    own = sum(n / (shards if settings.optimizer.distributed else 1) for n, shards in groups)
    optimizer = _OPTIMIZER * own / (a.memory_bandwidth * a.decode_efficiency)
    parts = {
        "FLOP/s": work,
        "exchange of tokens": routed,
        "pipeline bubble": (work + routed) * (bubble - 1),
        "gradient reduction": reduction,
        "optimizer": optimizer,
        "overheads": a.update_overhead,
    }
    bound = max(parts, key=lambda name: parts[name])
    if bound == "FLOP/s" and tokens <= lengths.longest:
        bound = "one longest sequence per replica"
    return Phase("update", updates * sum(parts.values()), bound)


def _sync(plan: Plan, a: Assumptions, replicas: float, data: float, *, shared: bool) -> Phase:
    """Bytes over bandwidth: of the busiest sender or of a worker, whichever transfers more.

    Workers read from the memory of GPUs (``cuda_ipc``), through host memory (``shared_memory``: copied there
    and back), or over the network (``process_group``; gloo to colocated engines).
    """
    settings = plan.settings
    worker = plan.engine.weights
    transport = settings.bridge.transport
    if shared != settings.engine.colocated:  # another placement than the settings': a transport for it
        transport = "cuda_ipc" if shared else "process_group"
    if transport == "process_group":
        # All ranks of a replica share what its engines read.
        parallel = settings.parallel
        workers = engines_of_a_replica(replicas, parallel, data) * settings.engine.tensor
        sent = workers * worker / (parallel.tensor * parallel.pipeline)
        link = a.gloo if shared else a.network * a.link_efficiency
        who = "busiest sender" if sent > worker else "an engine worker"
        kind = "gloo" if shared else "network"
        return Phase("sync", a.sync_overhead + max(sent, worker) / link, f"{kind}, {who}")
    if transport == "cuda_ipc":
        return Phase("sync", a.sync_overhead + worker / (a.nvlink * a.link_efficiency), "NVLink")
    rank = ITEM_BYTES[settings.precision.dtype] * plan.largest.parameters
    return Phase("sync", a.sync_overhead + (rank + worker) / (a.host_link * a.link_efficiency), "host link")


def _handover(plan: Plan, a: Assumptions, data: float) -> Phase:
    """Optimizer state is moved to host memory and back; engines sleep and wake."""
    settings = plan.settings
    _, _, state = state_bytes(
        settings.precision.dtype, distributed=settings.optimizer.distributed, replicas=1
    )
    own = sum(n / (shards if settings.optimizer.distributed else 1) for n, shards in _replicated(plan, data))
    here = state * own * (1 - settings.memory.offload_optimizer)
    return Phase(
        "handover",
        2 * (a.handover_overhead + here / (a.host_link * a.link_efficiency)),
        "host link, overheads",
    )

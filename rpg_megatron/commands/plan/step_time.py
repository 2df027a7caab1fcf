"""Seconds of each phase of a step, computed from stated assumptions. Nothing here was measured on a GPU.

Notation: P parameters in matrix products (without the input embedding), n tokens of a sequence, L layers,
b bytes of a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rpg_megatron.commands.plan.gpus import Assumptions
from rpg_megatron.commands.plan.layout import (
    GPUS_PER_NODE,
    RankParameters,
    engines_of_a_replica,
    in_fp8,
    rank_parameters,
)
from rpg_megatron.commands.plan.plan import Plan
from rpg_megatron.commands.plan.trainer_memory import TEACHER, recomputation, state_bytes
from rpg_megatron.config import ModelShape, read_model_shape
from rpg_megatron.config.lora import OUTPUT_LAYER
from rpg_megatron.system.dtypes import ITEM_BYTES

Name = Literal["rollout", "rollout: tail", "log-probs", "update", "sync", "handover", "other"]
Placement = Literal["colocated", "by turns", "overlapped"]

_OPTIMIZER = 30
"""Bytes that AdamW reads and writes for each parameter that a rank updates: gradient and, in float32, weight
and two moments, read and written; the bfloat16 weight is written."""
GLOO = 0.98e9
"""Bytes/s of a sync over gloo with 2 CPU cores; measured (docs/weight-sync.md)."""
LINK_EFFICIENCY = 0.7
"""Fraction of the speed of NVLink, network and host link that transfers reach; assumed."""
ALLREDUCE = 15e-6
"""Seconds of an all-reduce of a decoding step, two per layer if engine.tensor > 1; assumed."""
ALLREDUCE_BETWEEN_NODES = 75e-6
"""The same for an engine on more than one node: 4 KB on a cluster of H100s (NVIDIA/nccl#1453)."""
HANDOVER = 2.0
"""Seconds of a handover of a shared GPU besides transfers: engines sleep or wake; assumed."""


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
    trained_tokens: float
    """Prompt and response tokens that a step trains on."""
    under_way: float
    """Seconds in which engines sample a mean response: about what a stop in the rollout loses."""
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


def step_times(plan: Plan, assumed: Assumptions) -> tuple[StepTime, ...]:
    """The step with the placement of the settings, then with the other two placements.

    Without ``rollout.ahead``, trainer and engines on separate GPUs take turns; with it they overlap. Other
    placements have the same total number of GPUs; data-parallel ranks and engines are scaled, possibly to
    fractions, and memory is not checked. A colocated run is compared with half of its GPUs for each.
    """
    trainer, engines, colocated = plan.gpus.trainer, plan.gpus.engines, plan.gpus.colocated
    total = max(trainer, engines) if colocated else trainer + engines
    separate = (total / 2, total / 2) if colocated else (trainer, engines)
    placements: list[tuple[Placement, float, float]] = [
        ("colocated", *((trainer, engines) if colocated else (total, total))),
        ("by turns", *separate),
        ("overlapped", *separate),
    ]
    current: Placement = (
        "colocated" if colocated else "overlapped" if plan.settings.rollout.ahead else "by turns"
    )
    placements.sort(key=lambda placement: placement[0] != current)
    return tuple(_step(_Case(plan, assumed, *placement)) for placement in placements)


@dataclass(frozen=True)
class _Case:
    """A placement, and what its phases are computed from."""

    plan: Plan
    assumed: Assumptions
    placement: Placement
    trainer_gpus: float
    engine_gpus: float

    @property
    def data(self) -> float:
        """Data-parallel replicas of the trainer."""
        parallel = self.plan.settings.parallel
        return parallel.data * self.trainer_gpus / parallel.world

    @property
    def engines(self) -> float:
        return self.engine_gpus / self.plan.settings.engine.tensor

    @property
    def item(self) -> int:
        """Bytes of a parameter."""
        return ITEM_BYTES[self.plan.settings.precision.dtype]

    @property
    def peak(self) -> float:
        """FLOP/s of products that are not in FP8."""
        return self.assumed.peak("fp32" if self.item == 4 else "bf16")

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.assumed.prompt_mean * self.plan.settings.data.max_prompt_tokens

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return self.assumed.response_mean * self.plan.settings.rollout.max_response_tokens

    @property
    def longest_response(self) -> float:
        """Tokens of a step's longest response."""
        return self.assumed.response_longest * self.plan.settings.rollout.max_response_tokens

    @property
    def longest(self) -> float:
        """Tokens of a mean prompt with the longest response."""
        return self.prompt + self.longest_response

    def replica_work(self, sequences: float) -> tuple[float, float]:
        """Sums of n and n^2 on a data-parallel replica: its part, but at least one longest sequence.

        With shared prompts the first response of each group counts its prompt, as if a group's responses were
        in one row.
        """
        mean, each = self.prompt + self.response, sequences / self.data
        repeated = self.shared * (1 - 1 / self.plan.settings.rollout.samples_per_prompt)
        tokens, squares = mean - repeated, mean**2 - repeated * self.shared
        return max(each * tokens, self.longest), max(each * squares, self.longest**2)

    @property
    def shared(self) -> float:
        """Tokens of a mean prompt that responses share (``row_layout.shareable``)."""
        least, shared = self.plan.settings.training.shared_from, max(0.0, self.prompt - 1)
        return shared if least is not None and shared >= least * (shared + self.response) else 0.0

    @property
    def parameters(self) -> RankParameters:
        """Those of the largest rank."""
        return rank_parameters(self.plan.settings, self.plan.shape, self.plan.largest.stage)

    @property
    def owned(self) -> float:
        """Parameters whose optimizer state is on the largest rank."""
        return self.parameters.owned(self.plan.settings, self.data)

    @property
    def frozen(self) -> bool:
        """Whether the model's weights are frozen, beside adapters."""
        return self.plan.settings.lora is not None

    def microbatches(self, tokens: float) -> int:
        """Micro-batches of a replica with this number of tokens."""
        return max(1, math.ceil(tokens / self.plan.settings.training.tokens_per_microbatch))

    def bubble(self, tokens: float) -> float:
        """Pipeline time over that of its work: 1 + (p - 1) / (v m) (arXiv 2104.04473, 2.2)."""
        parallel = self.plan.settings.parallel
        return 1 + (parallel.pipeline - 1) / parallel.virtual / self.microbatches(tokens)


def _step(case: _Case) -> StepTime:
    rollout, under_way = _rollout(case)
    phases = [*rollout, _log_probs(case), _update(case), _scaled(_sync(case), case.assumed.sync_factor)]
    if case.placement == "colocated":
        phases.append(_scaled(_handover(case), case.assumed.handover_factor))
    phases.append(Phase("other", case.assumed.step_overhead, "fixed"))
    tokens = case.plan.batch.sequences * (case.prompt + case.response)
    drained = case.placement == "overlapped" and case.plan.settings.rollout.inflight == "drain"
    gpus = case.trainer_gpus, case.engine_gpus
    return StepTime(case.placement, *gpus, tuple(phases), tokens, under_way, drained)


def _scaled(phase: Phase, factor: float) -> Phase:
    return replace(phase, seconds=factor * phase.seconds)


def _pass_seconds(
    case: _Case,
    tokens: float,
    squares: float,
    *,
    layers: float,
    mlp: float,
    head: float,
    weight_gradients: bool = False,
) -> float:
    """Seconds of a replica's GPUs at their peak for passes over sequences with these sums of n and n^2.

    A forward pass takes 2 P n for products with weights (Kaplan et al. 2020, arXiv 2001.08361, 2.1) and
    2 n^2 heads head_dim L for causal attention, half of 4 n^2 (Narayanan et al. 2021, arXiv 2104.04473,
    appendix). A backward pass takes twice that. layers, mlp, head: number of passes, a backward pass as two;
    mlp: additional ones of the MLPs alone. weight_gradients: the passes include one for the gradients of
    weights, which frozen ones do not need.
    """
    shape, settings = case.plan.shape, case.plan.settings
    adapters = case.plan.trained if case.frozen else 0
    of_head = 0
    if settings.lora is not None and OUTPUT_LAYER in settings.lora.names:
        of_head = settings.lora.rank * (shape.vocab_size + shape.hidden_size)
    saved = weight_gradients and case.frozen
    in_layers, in_head = shape.matmul_parameters
    in_mlp = 3 * shape.hidden_size * shape.active_ffn_columns
    fp8_layers = sum(in_fp8(settings.precision.fp8, n, shape.num_layers) for n in range(shape.num_layers))
    share = fp8_layers / shape.num_layers
    linear = 2 * tokens * ((layers - saved) * in_layers + mlp * in_mlp)
    attention = 2 * squares * layers * shape.num_heads * shape.head_dim * shape.num_layers
    other = 2 * tokens * ((head - saved) * in_head + layers * (adapters - of_head) + head * of_head)
    flops = linear * (share / case.assumed.speedup_in_fp8 + 1 - share) + attention + other
    return flops / case.peak / (settings.parallel.world / settings.parallel.data)


def _rollout(case: _Case) -> tuple[list[Phase], float]:
    """Prefill, decoding at the batch that fits, and the tail; and the seconds of a mean response.

    A decoding step of batch B takes the longer of two times, plus overheads: reading the weights and the
    batch's keys and values, and computing 2 P B FLOPs (Pope et al. 2022, arXiv 2211.05102, 2.1). All
    responses are decoded at batch B; then the longest one continues alone, from the mean to the maximum
    length. Prompts are prefilled once per group (prefix caching).
    """
    assumed, shape, rollout, engine = (
        case.assumed,
        case.plan.shape,
        case.plan.settings.rollout,
        case.plan.settings.engine,
    )
    prompts = rollout.prompts_per_step / (assumed.kept_groups if rollout.dynamic is not None else 1)
    sequences = max(1.0, prompts * rollout.samples_per_prompt / case.engines)  # of an engine
    in_layers, in_head = shape.matmul_parameters
    fp8 = engine.quantization == "fp8"
    flops = case.peak * (assumed.speedup_in_fp8 if fp8 else 1) * assumed.score_mfu * engine.tensor
    bandwidth = assumed.memory_bandwidth * assumed.decode_efficiency
    reduced = ALLREDUCE if engine.tensor <= GPUS_PER_NODE else ALLREDUCE_BETWEEN_NODES
    fixed = assumed.decode_overhead + (2 * shape.num_layers * reduced if engine.tensor > 1 else 0)

    def token(batch: float, context: float) -> tuple[float, float]:
        """Seconds to read and to compute in one decoding step."""
        idle = 3 * shape.hidden_size * (_read_columns(shape, batch) - shape.active_ffn_columns)
        weights = ((in_layers + idle) * (1 if fp8 else case.item) + in_head * case.item) / engine.tensor
        read = weights + case.plan.engine.adapters + batch * context * case.plan.engine.kv_bytes_per_token
        return read / bandwidth, 2 * (in_layers + in_head) * batch / flops

    context = case.prompt + case.response / 2
    batch = max(1.0, min(engine.max_sequences, sequences, case.plan.engine.kv_tokens / context))
    read, computed = token(batch, context)
    response = case.response * (max(read, computed) + fixed)
    seconds = sequences / batch * response
    attention = 2 * case.prompt**2 * shape.num_heads * shape.head_dim * shape.num_layers
    prefill = prompts / case.engines * (2 * (in_layers + in_head) * case.prompt + attention) / flops
    parts = {"memory bandwidth": read, "FLOP/s": computed, "overheads": fixed}
    bound = max(parts, key=lambda name: parts[name])
    bound = "prefill" if prefill > seconds else f"{bound}, {batch:.0f} at once"
    left = max(0.0, case.longest_response - case.response)
    alone = max(token(1, case.prompt + case.response + left / 2)) + fixed
    factor = assumed.rollout_factor
    phases = [
        Phase("rollout", factor * (seconds + prefill), bound),
        Phase("rollout: tail", factor * left * alone, "one response alone"),
    ]
    return phases, factor * response


def _read_columns(shape: ModelShape, batch: float) -> float:
    """Feed-forward columns of all layers that a decoding step of ``batch`` sequences reads.

    With even and independent choices of k of E experts per token, E (1 - (1 - k/E)^batch) experts are used.
    """
    e = shape.experts
    if e is None:
        return shape.num_layers * shape.ffn_hidden_size
    chosen: float = e.count * (1 - (1 - e.per_token / e.count) ** batch)
    dense = (shape.num_layers - len(e.layers)) * shape.ffn_hidden_size
    return dense + len(e.layers) * (chosen * e.ffn_hidden_size + e.count / 3)


def _log_probs(case: _Case) -> Phase:
    """Forward passes for ``old`` and a held anchor, which is swapped in and out, and one of a teacher."""
    passes = case.plan.settings.scoring_passes
    tokens, squares = case.replica_work(case.plan.batch.sequences)
    work = _pass_seconds(case, tokens, squares, layers=1, mlp=0, head=1) / case.assumed.score_mfu
    exchange = _exchange_seconds(case, tokens)
    seconds = passes * (work + exchange) * case.bubble(tokens)
    if case.plan.settings.anchor.type != "old":  # twice, in both directions
        seconds += 4 * case.item * case.plan.largest.trained / (case.assumed.gpu.host_link * LINK_EFFICIENCY)
    bound = "FLOP/s" if work >= exchange else "communication"
    if case.plan.settings.full_divergence is None:
        seconds += _teacher_seconds(case, tokens, squares)
    return Phase("log-probs", seconds, f"{bound}, {passes:.2g} pass{'' if passes == 1 else 'es'}")


def _teacher_seconds(case: _Case, tokens: float, squares: float) -> float:
    """Seconds of a forward pass of a teacher that the ranks hold, whose weights are copied to the GPU first.

    Its exact divergences (``form: full``) take one for each update. 0: there is none, or it is a server.
    """
    teacher = case.plan.settings.teacher
    if teacher is None or teacher.path is None:
        return 0.0
    settings = case.plan.settings.model_copy(update={"lora": None})
    plan = replace(case.plan, shape=read_model_shape(teacher.path), settings=settings)
    other = replace(case, plan=plan)
    work = _pass_seconds(other, tokens, squares, layers=1, mlp=0, head=1) / case.assumed.score_mfu
    copied = sum(part.nbytes for part in case.plan.largest.parts if part.name == TEACHER)
    seconds = (work + _exchange_seconds(other, tokens)) * case.bubble(tokens)
    return seconds + copied / (case.assumed.gpu.host_link * LINK_EFFICIENCY)


def _exchange_seconds(case: _Case, tokens: float) -> float:
    """Seconds of a forward pass besides its products: of experts, and of tensor parallelism.

    tokens: those of a replica. A backward pass takes the same.
    """
    return _expert_seconds(case, tokens) + _tensor_seconds(case, tokens)


def _expert_seconds(case: _Case, tokens: float) -> float:
    """Routing, permutation and exchange of rows among expert-parallel ranks; 0 for a dense model.

    The larger of ``expert_overhead``, which is measured with all of these, and the bytes of the exchange:
    each row and its result are sent. Assumes even load, no overlap, rows to other nodes limited by the
    network, and rows within a node limited by NVLink. Gathering rows over expert tensor ranks is not counted.
    """
    e, parallel = case.plan.shape.experts, case.plan.settings.parallel
    if e is None:
        return 0.0
    each = tokens * len(e.layers) * parallel.data / parallel.world  # tokens and layers of a GPU
    seconds = case.assumed.expert_overhead
    if parallel.expert > 1:
        away = 1 - 1 / parallel.expert  # the fraction of rows that go to other ranks
        sent = 2 * e.per_token * case.plan.shape.hidden_size * case.item * away
        far = max(0.0, 1 - GPUS_PER_NODE / (parallel.expert * parallel.expert_tensor)) / away
        link = max(far / case.assumed.network, (1 - far) / case.assumed.nvlink)
        seconds = max(seconds, sent * link / LINK_EFFICIENCY)
    return each * seconds


def _tensor_seconds(case: _Case, tokens: float) -> float:
    """Tensor parallelism: two all-gathers and two reduce-scatters of the stream in each layer of a pass.

    Or two all-reduces, which send as much; not overlapped (Korthikanti et al. 2022, arXiv 2205.05198, 4.2.2).
    """
    shape, parallel = case.plan.shape, case.plan.settings.parallel
    if parallel.tensor == 1:
        return 0.0
    sent = 4 * (1 - 1 / parallel.tensor) * shape.hidden_size * case.item * shape.num_layers
    link = case.assumed.nvlink if parallel.tensor <= GPUS_PER_NODE else case.assumed.network
    return tokens * sent / (parallel.context * parallel.pipeline) / (link * LINK_EFFICIENCY)


def _update(case: _Case) -> Phase:
    """All updates of a step: forward, backward, recomputation, reduction of gradients, optimizer.

    The log-prob head is always recomputed in the backward pass. The reduction transfers a float32 gradient
    and the new weight of each parameter in a ring; with optimizer.overlap only the time beyond that of a
    micro-batch counts. Communication of context parallelism is part of ``train_mfu``; that of tensor
    parallelism and of experts is not.
    """
    settings, parallel, assumed = case.plan.settings, case.plan.settings.parallel, case.assumed
    tokens, squares = case.replica_work(case.plan.batch.sequences_per_update)
    again = recomputation(settings)
    layers, mlp = 3 + (again == "full"), again == "selective"
    passes = _pass_seconds(case, tokens, squares, layers=layers, mlp=mlp, head=4, weight_gradients=True)
    work = passes / assumed.train_mfu
    exchange = (2 + (again != "none")) * _exchange_seconds(case, tokens)
    link = (
        assumed.nvlink if parallel.tensor * case.data * parallel.context <= GPUS_PER_NODE else assumed.network
    )
    groups = case.parameters.replicated(parallel, case.data)
    moved = sum((4 + case.item) * n * (1 - 1 / replicas) for n, replicas in groups)
    reduction = moved / (link * LINK_EFFICIENCY)
    if settings.optimizer.overlap:
        reduction = max(0.0, reduction - (work + exchange) / case.microbatches(tokens))
    parts = {
        "FLOP/s": work,
        "communication": exchange,
        "pipeline bubble": (work + exchange) * (case.bubble(tokens) - 1),
        "gradient reduction": reduction,
        "optimizer": _OPTIMIZER * case.owned / (assumed.memory_bandwidth * assumed.decode_efficiency),
        "overheads": assumed.update_overhead,
    }
    if settings.full_divergence is not None:
        parts["teacher"] = _teacher_seconds(case, tokens, squares)
    bound = max(parts, key=lambda name: parts[name])
    if bound == "FLOP/s" and tokens <= case.longest:
        bound = "one longest sequence per replica"
    return Phase("update", case.plan.batch.updates * sum(parts.values()), bound)


def _sync(case: _Case) -> Phase:
    """Bytes over bandwidth: of the busiest sender or of a worker, whichever transfers more.

    Of adapters that engines apply, each worker reads all; the first sync, with the weights, does not count.

    Workers read from the memory of GPUs (``cuda_ipc``), through host memory (``shared_memory``: copied there
    and back), or over the network (``process_group``; gloo to colocated engines).
    """
    settings, worker, shared = case.plan.settings, case.plan.engine.weights, case.placement == "colocated"
    sender = case.plan.largest.parameters
    if settings.serves_adapters:
        worker, sender = case.item * case.plan.trained, case.plan.largest.trained
    transport = settings.bridge.transport
    if shared != settings.engine.colocated:  # another placement than the settings': a transport for it
        transport = "cuda_ipc" if shared else "process_group"
    if transport == "process_group":
        # All ranks of a replica share what its engines read.
        parallel = settings.parallel
        workers = engines_of_a_replica(case.engines, parallel, case.data) * settings.engine.tensor
        sent = workers * worker / (parallel.tensor * parallel.pipeline)
        link, kind = (GLOO, "gloo") if shared else (case.assumed.network * LINK_EFFICIENCY, "network")
        who = "busiest sender" if sent > worker else "an engine worker"
        return Phase("sync", max(sent, worker) / link, f"{kind}, {who}")
    if transport == "cuda_ipc":
        return Phase("sync", worker / (case.assumed.nvlink * LINK_EFFICIENCY), "NVLink")
    moved = case.item * sender + worker
    return Phase("sync", moved / (case.assumed.gpu.host_link * LINK_EFFICIENCY), "host link")


def _handover(case: _Case) -> Phase:
    """Optimizer state is moved to host memory and back; engines sleep and wake, some with their weights."""
    settings = case.plan.settings
    state = state_bytes(settings.precision.dtype, distributed=False, replicas=1)[2] * case.owned
    moved = 2 * state * (1 - settings.memory.offload_optimizer) + 2 * case.plan.engine.asleep
    seconds = 2 * HANDOVER + moved / (case.assumed.gpu.host_link * LINK_EFFICIENCY)
    return Phase("handover", seconds, "host link, overheads")

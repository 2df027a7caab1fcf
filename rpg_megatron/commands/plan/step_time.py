"""Seconds of each phase of a step, computed from stated assumptions. Nothing here was measured on a GPU.

Notation: P parameters in matrix products (without the input embedding), n tokens of a sequence, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rpg_megatron.commands.plan.gpus import Assumptions
from rpg_megatron.commands.plan.layout import in_fp8, rank_parameters
from rpg_megatron.commands.plan.plan import Plan
from rpg_megatron.commands.plan.trainer_memory import TEACHER, optimizer_bytes, readers
from rpg_megatron.config import read_model_shape
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import ITEM_BYTES

Name = Literal["rollout", "rollout: tail", "log-probs", "update", "sync", "handover", "other"]
Placement = Literal["colocated", "by turns", "overlapped"]

_OPTIMIZER = 30
"""Bytes that AdamW reads and writes for each parameter that a rank updates: gradient and, in float32, weight
and two moments, read and written; the bfloat16 weight is written."""
TAIL_EFFICIENCY = 0.5
"""As ``decode_efficiency``, of the last response alone; fitted with it to published steps. docs/plan.md."""
GLOO, LINK_EFFICIENCY, SLICE = 0.98e9, 0.7, 10e-6
"""Bytes/s of a sync over gloo with 2 CPU cores, measured (docs/weight-sync.md); fraction of the speed of
NVLink, network and host link that transfers reach, assumed; seconds of both hosts for a slice of a sync,
measured without a GPU (docs/evidence/plan.md)."""
ALLREDUCE, ALLREDUCE_BETWEEN_NODES = 15e-6, 75e-6
"""Seconds of an all-reduce of an engine's decoding step, two per layer; of one on several nodes."""
HANDOVER = 2.0
"""Seconds of a handover of a shared GPU besides transfers: engines sleep or wake; assumed."""
_MOST_BATCHES = 64
"""Of ``rollout.ahead`` that are tried."""
FP8_GAIN, EXPERT_OVERHEAD = 1.29, 1e-6
"""Speed of a layer's products in FP8 over that in bfloat16; seconds for each token, layer with experts and
pass on a GPU beside products. docs/evidence/plan.md."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step, and what limits its speed."""

    name: Name
    seconds: float
    bound: str


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    trained_tokens: of prompts and responses; under_way: seconds in which engines sample a mean response,
    about what a stop in the rollout loses; ahead: batches that may be sampled ahead; drained: a batch is
    finished before new weights.
    """

    placement: Placement
    phases: tuple[Phase, ...]
    trained_tokens: float
    under_way: float
    ahead: int = 0
    drained: bool = False

    def seconds(self, *names: Name) -> float:
        """Seconds of these phases."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)

    @property
    def step(self) -> float:
        """Seconds of a step: phases in turn, or rollouts beside log-probs and updates.

        A batch's groups start when the step ``ahead`` before it ends, and its last response is there when it
        is trained on: 1 + ahead steps are no shorter than a batch from its first group to its update.
        """
        if self.placement != "overlapped":
            return sum(phase.seconds for phase in self.phases)
        rest = self.seconds("sync", "other")
        in_time = 0 if self.drained else (self.longest + self.training + rest) / (1 + self.ahead)
        return max(self.generation + rest, self.training + rest, in_time)

    @property
    def longest(self) -> float:
        """Seconds of a batch from its first group to its longest response."""
        return max(self.under_way, self.seconds("rollout")) + self.seconds("rollout: tail")

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second."""
        return self.trained_tokens / self.step

    @property
    def generation(self) -> float:
        """Seconds of the engines' work on a batch; overlapped, the next batches fill them in its tail."""
        if self.placement == "overlapped" and not self.drained:
            return self.seconds("rollout")
        return self.seconds("rollout", "rollout: tail")

    @property
    def training(self) -> float:
        """Seconds in which the trainer computes."""
        return self.seconds("log-probs", "update")


class _Case:
    """What the phases of a step are computed from: mean tokens, speeds of a GPU."""

    def __init__(self, plan: Plan, assumed: Assumptions) -> None:
        self.plan, self.assumed, settings = plan, assumed, plan.settings
        self.item = ITEM_BYTES[settings.precision.dtype]
        gpu = assumed.gpu
        self.peak = assumed.peak_bf16 * (gpu.peak_fp32 / gpu.peak_bf16 if self.item == 4 else 1)
        self.fp8_gain = FP8_GAIN if gpu.peak_fp8 > gpu.peak_bf16 else 1.0
        self.host_link = gpu.host_link * LINK_EFFICIENCY
        self.prompt = assumed.prompt_mean * settings.data.max_prompt_tokens
        self.limit = settings.rollout.max_response_tokens  # of the longest response
        self.response, self.long = (self.limit * n for n in (assumed.response_mean, assumed.long_responses))
        self.spread = assumed.spread  # mean of n^2 over the square of the mean, of responses
        self.longest = self.prompt + self.limit
        self.held = rank_parameters(settings, plan.shape, plan.largest.stage)

    def link(self, ranks: float) -> float:
        """Bytes/s of a GPU in a group of so many neighbouring ranks."""
        within = ranks <= self.plan.gpus.per_node
        return LINK_EFFICIENCY * (self.assumed.gpu.nvlink if within else self.assumed.network)

    def replica_work(self, sequences: float) -> tuple[float, float]:
        """Sums of n and n^2 on a data-parallel replica: its part, but at least one longest sequence.

        Of a shared prompt the first response of each group counts it, as if they were in one row.
        """
        settings, shape, mean = self.plan.settings, self.plan.shape, self.prompt + self.response
        each = sequences / settings.parallel.data
        # Tokens of a mean prompt that responses share (``row_layout.shareable``).
        least, shared = settings.training.shared_from, max(0.0, self.prompt - 1)
        if least is None or shared < least * (shared + self.response):
            shared = 0.0
        repeated = shared * (1 - 1 / settings.rollout.samples_per_prompt)
        tokens, squares = mean - repeated, mean**2 - repeated * shared + (self.spread - 1) * self.response**2
        squares = shape.squares(squares**0.5) if shape.windows or shape.linear else squares
        return max(each * tokens, self.longest), max(each * squares, shape.squares(self.longest))

    def microbatches(self, tokens: float) -> int:
        """Micro-batches of a replica with this number of tokens."""
        return max(1, math.ceil(tokens / self.plan.settings.training.tokens_per_microbatch))

    def bubble(self, tokens: float) -> float:
        """Pipeline time over that of its work: 1 + (p - 1) / (v m) (arXiv 2104.04473, 2.2)."""
        parallel = self.plan.settings.parallel
        return 1 + (parallel.pipeline - 1) / parallel.virtual / self.microbatches(tokens)


def estimate_step(plan: Plan, assumed: Assumptions) -> StepTime:
    """The time of a step of the plan.

    With ``rollout.ahead`` the engines work on as many batches at once as make it shortest, 1 + ahead at most.
    """
    case, settings = _Case(plan, assumed), plan.settings
    trained = [_log_probs(case), _update(case), _sync(case)]
    trained += [_handover(case)] if settings.engine.colocated else []
    factors = assumed.factors  # the tail has the factor of the rollout
    ahead, drained = settings.rollout.ahead, settings.rollout.inflight == "drain"
    apart: Placement = "overlapped" if ahead else "by turns"

    def step(batches: int) -> StepTime:
        phases, under_way = _rollout(case, batches)
        named = [(p, factors.get(p.name.split(":")[0], 1)) for p in (*phases, *trained)]
        return StepTime(
            placement="colocated" if settings.engine.colocated else apart,
            phases=(
                *(replace(p, seconds=factor * p.seconds) for p, factor in named),
                Phase("other", assumed.step_overhead, "fixed"),
            ),
            trained_tokens=plan.batch.sequences * (case.prompt + case.response),
            under_way=under_way * factors.get("rollout", 1),
            ahead=ahead,
            drained=ahead > 0 and drained,
        )

    most = 1 if drained else min(1 + ahead, _MOST_BATCHES)
    return min(map(step, range(1, most + 1)), key=lambda step: step.step)


def _work(
    case: _Case, tokens: float, squares: float, mfu: float, *, layers: int = 1, head: int = 1, mlp: int = 0
) -> float:
    """Seconds of a replica's GPUs for the products of sequences with these n and n^2 (``forward_flops``).

    layers, head: passes through the layers and the output layer, a backward pass as two, one of which is for
    the gradients of weights and left out where they are frozen; mlp: more through the MLPs alone.
    """
    shape, settings = case.plan.shape, case.plan.settings
    in_layers, in_head = shape.matmul_parameters
    in_fp8_layers = sum(in_fp8(settings.precision.fp8, n, shape.num_layers) for n in range(shape.num_layers))
    faster = in_fp8_layers / shape.num_layers * (1 - 1 / case.fp8_gain)
    frozen = int(settings.lora is not None and layers > 1)
    passes = (  # parameters, passes
        ((1 - faster) * in_layers, layers - frozen),
        ((1 - faster) * 3 * shape.hidden_size * shape.active_ffn_columns, mlp),
        (in_head, head - frozen),
        (shape.state_products, layers),
        (case.plan.trained * (settings.lora is not None), layers),
    )
    flops = 2 * tokens * sum(parameters * number for parameters, number in passes)
    flops += layers * shape.forward_flops(0, squares)
    return flops / case.peak / (settings.parallel.world / settings.parallel.data) / mfu


def _rollout(case: _Case, batches: int) -> tuple[list[Phase], float]:
    """Prefill, decoding at the batch that fits, and the tail; and the seconds of a mean response.

    batches: of the trainer's, that the engines work on at once.
    A decoding step of batch B takes the longer of reading the weights and the batch's keys and values, and of
    computing 2 P B FLOPs (Pope et al. 2022, arXiv 2211.05102, 2.1), plus overheads. All responses are decoded
    at batch B up to their mean length, then a third of B up to ``response_p90``, then the longest one alone.
    Prompts are prefilled once per group (prefix caching); with linear attention for each response.
    """
    assumed, shape, settings, memory = case.assumed, case.plan.shape, case.plan.settings, case.plan.engine
    rollout, engine = settings.rollout, settings.engine
    prompts = rollout.prompts_per_step / (assumed.kept_groups if rollout.dynamic is not None else 1)
    sequences = max(1.0, prompts * rollout.samples_per_prompt / engine.replicas)  # of an engine
    in_layers, in_head = shape.matmul_parameters
    fp8 = engine.quantization == "fp8"
    flops = case.peak * (case.fp8_gain if fp8 else 1) * assumed.score_mfu * engine.tensor
    reduced = ALLREDUCE if engine.tensor <= case.plan.gpus.per_node else ALLREDUCE_BETWEEN_NODES
    fixed = assumed.decode_overhead + (2 * shape.num_layers * reduced if engine.tensor > 1 else 0)

    def token(batch: float, context: float, efficiency: float) -> tuple[float, float]:
        """Seconds to read and to compute in one decoding step. efficiency: of the memory bandwidth.

        It reads E (1 - (1 - k/E)^batch) experts of each layer, if k of E are chosen evenly, independently.
        """
        idle = 0.0
        if (e := shape.experts) is not None:
            chosen = e.count * (1 - (1 - e.per_token / e.count) ** batch)
            idle = 3 * shape.hidden_size * len(e.layers) * (chosen - e.per_token) * e.ffn_hidden_size
        weights = ((in_layers + idle) * (1 if fp8 else case.item) + in_head * case.item) / engine.tensor
        keys = shape.attended(context) * memory.kv_bytes_per_token
        read = weights + memory.adapters + batch * (keys + 2 * memory.state)  # states are written, too
        products = in_layers + in_head + shape.state_products
        return read / assumed.memory_bandwidth / efficiency, 2 * products * batch / flops

    # Keys and values of a response at a random moment of its decoding, which long ones have more of.
    context = case.prompt + case.spread * case.response / 2
    batch = max(1.0, min(engine.most_sequences, batches * sequences, memory.sequences(context)))
    read, computed = token(batch, context, assumed.decode_efficiency)
    response = case.response * (max(read, computed) + fixed)
    seconds = sequences / batch * response
    prefilled = prompts * (rollout.samples_per_prompt if shape.linear else 1) / engine.replicas
    prefill = prefilled * shape.forward_flops(case.prompt, shape.squares(case.prompt)) / flops
    bounds = {"memory bandwidth": read, "FLOP/s": computed, "overheads": fixed}
    bound = "prefill" if prefill > seconds else f"{max(bounds, key=bounds.__getitem__)}, {batch:.0f} at once"
    tail, last = 0.0, case.response
    ends = (case.long, max(1.0, batch / 3), assumed.decode_efficiency), (case.limit, 1.0, TAIL_EFFICIENCY)
    for end, still, efficiency in ends:
        each = max(token(still, case.prompt + (last + end) / 2, efficiency)) + fixed
        tail, last = tail + (end - last) * each, end
    alone = Phase("rollout: tail", tail, "one response alone")
    return [Phase("rollout", seconds + prefill, bound), alone], response


def _log_probs(case: _Case) -> Phase:
    """Forward passes for ``old`` and a held anchor, which is swapped in and out, and one of a teacher."""
    settings = case.plan.settings
    number = settings.scoring_passes
    tokens, squares = case.replica_work(case.plan.batch.sequences)
    work, exchange = _work(case, tokens, squares, case.assumed.score_mfu), _exchange_seconds(case, tokens)
    seconds = number * (work + exchange) * case.bubble(tokens)
    if settings.anchor.type != "old":  # twice, in both directions
        seconds += 4 * case.item * case.plan.largest.trained / case.host_link
    if settings.full_divergence is None:
        seconds += _teacher_seconds(case, tokens, squares)
    bound = "FLOP/s" if work >= exchange else "communication"
    return Phase("log-probs", seconds, f"{bound}, {number:.2g} pass{'' if number == 1 else 'es'}")


def _teacher_seconds(case: _Case, tokens: float, squares: float) -> float:
    """A forward pass of a teacher that the ranks hold, whose weights are copied to the GPU first; 0: none."""
    teacher = case.plan.settings.teacher
    if teacher is None or teacher.path is None:
        return 0.0
    settings = case.plan.settings.model_copy(update={"lora": None})
    plan = replace(case.plan, shape=read_model_shape(teacher.path), settings=settings)
    other = _Case(plan, case.assumed)
    copied = sum(part.nbytes for part in case.plan.largest.parts if part.name == TEACHER)
    work = _work(other, tokens, squares, case.assumed.score_mfu) + _exchange_seconds(other, tokens)
    return work * case.bubble(tokens) + copied / case.host_link


def _exchange_seconds(case: _Case, tokens: float) -> float:
    """Communication of a pass over ``tokens`` of a replica, not overlapped.

    Tensor parallelism: two all-gathers and two reduce-scatters of the stream in each layer (arXiv 2205.05198,
    4.2.2). Experts: ``EXPERT_OVERHEAD`` or, if longer, the bytes of each row and its result with even load,
    over the network or NVLink; not gathers over expert tensor ranks.
    """
    shape, parallel, e = case.plan.shape, case.plan.settings.parallel, case.plan.shape.experts
    row = shape.hidden_size * case.item
    sent = 4 * (1 - 1 / parallel.tensor) * row * shape.num_layers / (parallel.context * parallel.pipeline)
    of_stream = tokens * sent / case.link(parallel.tensor)
    if e is None:
        return of_stream
    seconds = EXPERT_OVERHEAD
    if parallel.expert > 1:
        away = 1 - 1 / parallel.expert  # the fraction of rows that go to other ranks
        far = max(0.0, 1 - case.plan.gpus.per_node / (parallel.expert * parallel.expert_tensor)) / away
        sent = 2 * e.per_token * row * away
        seconds = max(seconds, sent * far / case.link(math.inf), sent * (1 - far) / case.link(1))
    return of_stream + tokens * len(e.layers) * parallel.data / parallel.world * seconds


def _update(case: _Case) -> Phase:
    """All updates of a step, whose backward pass recomputes the log-prob head.

    The reduction transfers a float32 gradient and the new weight of each parameter in a ring; with
    optimizer.overlap only the time beyond that of a micro-batch counts. ``train_mfu`` has that of CP.
    """
    plan, assumed = case.plan, case.assumed
    settings, parallel = plan.settings, plan.settings.parallel
    tokens, squares = case.replica_work(plan.batch.sequences_per_update)
    again = settings.recompute
    passes = {"layers": 3 + (again == "full"), "head": 4, "mlp": int(again == "selective")}
    work = _work(case, tokens, squares, assumed.train_mfu, **passes)
    exchange = (2 + (again != "none")) * _exchange_seconds(case, tokens)
    groups = case.held.replicated(parallel)
    moved = sum((4 + case.item) * n * (1 - 1 / replicas) for n, replicas in groups)
    reduction = moved / case.link(parallel.tensor * parallel.data * parallel.context)
    if settings.optimizer.overlap:
        reduction = max(0.0, reduction - (work + exchange) / case.microbatches(tokens))
    updated = _OPTIMIZER * case.held.owned(settings)
    muon = (settings.optimizer.type == "muon") * case.held.orthogonalised
    parts = {
        "FLOP/s": work,
        "communication": exchange,
        "pipeline bubble": (work + exchange) * (case.bubble(tokens) - 1),
        "gradient reduction": reduction,
        "optimizer": updated / (assumed.memory_bandwidth * assumed.decode_efficiency)
        + muon / (case.peak * assumed.train_mfu),
    }
    if settings.full_divergence is not None:
        parts["teacher"] = _teacher_seconds(case, tokens, squares)
    bound = max(parts, key=parts.__getitem__)
    if bound == "FLOP/s" and tokens <= case.longest:
        bound = "one longest sequence per replica"
    return Phase("update", plan.batch.updates * sum(parts.values()), bound)


def _sync(case: _Case) -> Phase:
    """Bytes over bandwidth, of the busiest sender or of a worker; and what the hosts do for each slice.

    Workers read from GPUs (``cuda_ipc``), through host memory (``shared_memory``: there and back), or over
    the network (``process_group``; gloo to colocated engines). Each reads all adapters that it applies.
    """
    settings, worker, sender = case.plan.settings, case.plan.engine.weights, case.plan.largest.parameters
    slices = len(mapping_for(case.plan.shape).hf_tensors())
    if (lora := settings.lora) is not None and settings.serves_adapters:
        worker, sender = case.item * case.plan.trained, case.plan.largest.trained
        slices = len(AdapterMapping(case.plan.shape, lora).hf_tensors())
    transport, parallel = settings.bridge.transport, settings.parallel
    seconds, bound = (case.item * sender + worker) / case.host_link, "host link"
    if transport == "process_group":
        # All ranks of a replica share what its engines read.
        sent = readers(settings) * worker / (parallel.tensor * parallel.pipeline)
        link, kind = (GLOO, "gloo") if settings.engine.colocated else (case.link(math.inf), "network")
        who = "busiest sender" if sent > worker else "an engine worker"
        seconds, bound = max(sent, worker) / link, f"{kind}, {who}"
    elif transport == "cuda_ipc":
        seconds, bound = worker / case.link(1), "NVLink"
    hosts = SLICE * slices
    return Phase("sync", seconds + hosts, f"hosts, {slices:,} slices" if hosts > seconds else bound)


def _handover(case: _Case) -> Phase:
    """Optimizer state is moved to host memory and back; engines sleep and wake, some with their weights."""
    settings = case.plan.settings
    state = optimizer_bytes(settings, case.held) * (1 - settings.memory.offload_optimizer)
    moved = 2 * (state + case.plan.engine.asleep)
    return Phase("handover", 2 * HANDOVER + moved / case.host_link, "host link, overheads")

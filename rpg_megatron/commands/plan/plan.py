"""The plan of a run: sizes, batch, memory of every process by part, whether it fits; and other layouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import get_args

from rpg_megatron.commands.plan.activations import Device, Recompute, StageActivations
from rpg_megatron.commands.plan.engine_memory import (
    SERVER,
    EngineMemory,
    choose_sequences,
    engine_memory,
    share_gpu,
)
from rpg_megatron.commands.plan.gpus import DEFAULT, find_gpu, gpu_bytes, machine_bytes
from rpg_megatron.commands.plan.layout import BatchPlan, Gpus, count_gpus, plan_batch, sharing_pays
from rpg_megatron.commands.plan.trainer_memory import (
    IMPORTS,
    RESERVE,
    SHARED,
    MemoryPart,
    RankMemory,
    host_memory,
    phase_peaks,
    rank_memory,
)
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.config.errors import gib
from rpg_megatron.engine.hybrid_cache import hybrid_cache
from rpg_megatron.launcher.checks import LAYOUT, CheckedRun, run_checks
from rpg_megatron.launcher.nodes import span_note
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.registry import mapping_for

ROOM = 4 * 1024**3
"""Layouts that leave less of a GPU are marked tight, since the estimates were not measured on GPUs."""

MOST_RANKS = 1024
"""The most trainer ranks of a layout that is suggested."""


@dataclass(frozen=True)
class Target:
    """The memory that the run must fit: bytes of one GPU, or of the machine."""

    device: Device
    name: str
    nbytes: int
    per_node: int = 8
    """GPUs of a node."""


@dataclass(frozen=True)
class Plan:
    """Estimates of a run before it starts."""

    settings: Settings
    shape: ModelShape
    target: Target
    batch: BatchPlan
    ranks: tuple[RankMemory, ...]
    """Per pipeline stage, a rank of data-parallel replica 0, and one of another replica, if any."""
    engine: EngineMemory
    gpus: Gpus
    host: tuple[MemoryPart, ...]
    """Host memory of rank 0's node: with GPUs, the ranks' host memory and the step; on a CPU, the step."""
    shared_gpu: tuple[MemoryPart, ...]
    """What is on a GPU that a rank and an engine worker share; empty: separate GPUs, or a CPU."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, without adapters."""
        return mapping_for(self.shape).parameters

    @property
    def trained(self) -> int:
        """Number of those that updates change: all, or those of adapters."""
        lora = self.settings.lora
        return self.parameters if lora is None else AdapterMapping(self.shape, lora).parameters

    @property
    def turns(self) -> dict[str, int]:
        """Peak bytes of a shared GPU while engines sample (rollout), and while the rank computes (update)."""
        return phase_peaks(self.shared_gpu)

    @property
    def activations(self) -> dict[Recompute, int]:
        """Bytes on the largest rank, for each value of memory.recompute."""
        return {kind: self._activations.saved(kind) for kind in get_args(Recompute)}

    @property
    def routed_to_one(self) -> int:
        """Additional bytes on the largest rank if all tokens choose its experts; 0 for a dense model."""
        of_stage, kind = self._activations, self.settings.recompute
        even, worst = (of_stage.saved(kind, worst=w) + of_stage.working(kind, worst=w) for w in (False, True))
        return worst - even

    @property
    def _activations(self) -> StageActivations:
        return StageActivations(self.settings, self.shape, self.largest.stage, self.batch, self.target.device)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run is impossible or does not fit, each with a fix; empty: it fits."""
        settings, engine, target = self.settings, self.engine, self.target
        gpu, has = find_gpu(target.name), gib(target.nbytes)
        apart = self.on_gpu and not self.shared_gpu
        uncached = apart and settings.engine.replicas > 0 and engine.kv_cache < 0
        worker = engine.total if apart and settings.engine.replicas and not uncached else 0
        rollout, update = (self.turns.get(name, 0) for name in ("rollout", "update"))
        of_rank, of_worker = (f", of which {gib(n)} are" for n in (self.rank_total, engine.total))
        lower = "; lower training.tokens_per_microbatch or engine.kv_cache_gib"
        lower_cache = "; lower engine.kv_cache_gib, or raise engine.tensor or parallel.tensor"
        too_large = (
            ("all processes together need", 0 if self.on_gpu else self.need, lower),
            ("during an update a GPU holds", update, f"{of_rank} a trainer rank's"),
            ("while engines sample, a GPU holds", rollout, f"{of_worker} an engine worker's{lower_cache}"),
            ("a trainer rank needs", self.rank_total if apart else 0, ""),
            ("an engine worker needs", worker, "; lower --gpu-memory-utilization in engine.arguments"),
        )
        more = "engine.tensor" if engine.utilisation else "engine.kv_cache_gib"
        most, cache = settings.engine.most_sequences, hybrid_cache(settings, self.shape)
        blocks = max(0, engine.kv_cache) // cache.block_bytes if cache else most
        return told(
            {
                f"ranks and engines cannot be placed on nodes of {target.per_node} GPUs: {self.gpus.why}": (
                    self.on_gpu and self.gpus.why
                ),
                "precision.fp8 needs compute capability 9.0 (Hopper) or later, which "
                f"{target.name} lacks; set precision.fp8=null": (
                    settings.precision.fp8 and gpu is not None and not gpu.trains_fp8
                ),
                **{
                    f"{what} {gib(size)}, {target.name} has {has}{fix}": size > target.nbytes
                    for what, size, fix in too_large
                },
                f"an engine worker needs {gib(engine.total - engine.buckets)} without a KV cache, and vLLM "
                f"uses {engine.utilisation or 0:.0%} of {has}; raise engine.tensor": uncached,
                f"engine.max_sequences is {most}, and the KV cache has {blocks} blocks for recurrent states, "
                f"so vLLM does not start; lower it to {blocks}": self.on_gpu and 0 < blocks < most,
                f"the KV cache holds {engine.kv_tokens:,} tokens, one sequence may have "
                f"{engine.sequence_tokens:,}; raise {more} or lower rollout.max_response_tokens": (
                    settings.engine.replicas and engine.kv_cache >= 0 and engine.full_sequences < 1
                ),
            }
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know although the run may fit."""
        settings, engine, batch, worst = self.settings, self.engine, self.batch, self.routed_to_one
        engines, replicas = settings.engine.replicas, settings.parallel.data * settings.parallel.context
        running = min(settings.engine.most_sequences, -(-batch.sequences // max(1, engines)))
        parts = -(-settings.engine.tensor // self.target.per_node) if self.on_gpu else 1
        verdict = "also fits" if worst <= self.left else "does not fit"
        of_plan = {
            f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, but {running} may run "
            "at once: vLLM will preempt and recompute some": engines
            and 1 <= engine.full_sequences < running / 4,
            f"pipeline ranks idle for {batch.pipeline_idle:.0%} of an update with {batch.microbatches} "
            "micro-batches; lower training.tokens_per_microbatch or training.minibatches": (
                batch.pipeline_idle > 0.25
            ),
            span_note(parts): parts > 1 and not self.gpus.why,
            "training.share_prompts: memory is that without it; shared prompts take less": (
                settings.training.share_prompts
            ),
            "optimizer.distributed shards nothing with one replica": (
                settings.optimizer.distributed and replicas == 1
            ),
            "engine.colocated: memory per turn is computed, not measured": self.shared_gpu,
            "the load of experts is assumed to be even; if all tokens of the expert-parallel ranks chose the "
            f"experts of one rank, an update would need {gib(worst)} more there, which {verdict}": worst,
            f"{gib(self.left)} of a GPU are left, less than {gib(ROOM)}: these estimates were not measured "
            "on a GPU; choose a layout with more room (--sweep)": self.tight and self.left >= 0,
            "precision.fp8: the memory of its emulation on a CPU is not counted": (
                settings.precision.fp8 and not self.on_gpu
            ),
        }
        return (*settings.notes(), *told(of_plan))

    @property
    def fits(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def on_gpu(self) -> bool:
        """Whether the run is planned for GPUs."""
        return self.target.device == "cuda"

    @property
    def largest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda r: r.peak)

    @property
    def rank_total(self) -> int:
        """Bytes of the largest rank, including imports or the GPU's reserve."""
        return self.largest.peak + (RESERVE if self.on_gpu else IMPORTS)

    @property
    def need(self) -> int:
        """Bytes that the target must have: of a GPU of the trainer, or on a CPU of all processes."""
        if self.shared_gpu:
            return max(self.turns.values())
        if self.on_gpu:
            return self.rank_total
        engine, parallel = self.settings.engine, self.settings.parallel
        total = SHARED + sum(part.nbytes for part in self.host)
        for rank in self.ranks:
            alike = 1 if rank.publishes else parallel.data * parallel.context - 1
            total += alike * parallel.tensor * (rank.peak + IMPORTS - SHARED)
        return total + engine.replicas * (SERVER + engine.tensor * self.engine.total)

    @property
    def left(self) -> int:
        """Free bytes of the target; negative: it does not fit."""
        return self.target.nbytes - self.need

    @property
    def tight(self) -> bool:
        """Whether little of a GPU is left, see ``ROOM``."""
        return self.on_gpu and self.left < ROOM

    @property
    def implementation(self) -> str:
        """Which layers were counted: transformer_engine or local."""
        return "transformer_engine" if self.settings.has_fused_layers(self.target.device) else "local"

    @property
    def overrides(self) -> str:
        """The settings that select this layout, for the command line."""
        parallel = self.settings.parallel
        more = ("expert", "expert_tensor") if self.shape.experts else ()
        return " ".join(
            f"parallel.{name}={str(getattr(parallel, name)).lower()}"
            for name in ("tensor", "pipeline", "context", "data", "sequence", *more)
        )


def make_plan(settings: Settings, gpu: str | None = None) -> Plan:
    """Plan a run for a GPU, by default for the settings' device.

    gpu: see ``gpu_bytes``. Raises UserError if the model's config.json cannot be read, or as ``plan_for``.
    """
    return plan_for(settings, read_model_shape(settings.model.path), find_target(settings, gpu))


def find_target(settings: Settings, gpu: str | None) -> Target:
    """The GPU of that name (``h100-80``, or ``4xh100-80`` in nodes of 4), or the settings' device."""
    if gpu is None and settings.device == "cpu":
        return Target("cpu", "this machine", machine_bytes())
    name = (gpu or DEFAULT).strip()
    nodes = re.fullmatch(r"([1-9]\d?)x(.+)", name)
    name, per_node = (nodes[2], int(nodes[1])) if nodes else (name, 8)
    return Target("cuda", name, gpu_bytes(name), per_node)


def plan_for(settings: Settings, shape: ModelShape, target: Target) -> Plan:
    """The plan of one layout. Raises UserError if it fails a check (``launcher/checks.py``)."""
    run_checks(CheckedRun(settings, LAYOUT, known=shape))
    parallel, device, shared = settings.parallel, target.device, settings.engine.colocated
    batch, gpus = plan_batch(settings, shape.max_positions), count_gpus(settings, target.per_node)
    on_gpu = device == "cuda"
    ranks = tuple(
        rank_memory(StageActivations(settings, shape, stage, batch, device), gpus, publishes=publishes)
        for stage in range(parallel.pipeline)
        for publishes in ((True, False) if parallel.data * parallel.context > 1 else (True,))
    )
    engine = engine_memory(
        settings, shape, gpus, longest=batch.context, device=device, gpu_bytes=target.nbytes
    )
    if on_gpu and settings.training.share_prompts == "auto" and not sharing_pays(settings, shape):
        return plan_for(settings.changed(training={"share_prompts": False}), shape, target)
    if on_gpu and settings.engine.max_sequences is None:
        chosen = choose_sequences(settings, engine)
        return plan_for(settings.changed(engine={"max_sequences": chosen}), shape, target)
    asleep = engine.asleep if shared and on_gpu else 0
    host = host_memory(settings, shape, batch, ranks, gpus, on_gpu=on_gpu, asleep=asleep)
    cards = [share_gpu(settings, rank, engine, gpus) for rank in ranks if shared and on_gpu]
    gpu = max(cards, key=lambda parts: max(phase_peaks(parts).values()), default=())
    return Plan(settings, shape, target, batch, ranks, engine, gpus, host, gpu)


def told(table: Mapping[str, object]) -> tuple[str, ...]:
    """The texts whose condition holds."""
    return tuple(text for text, condition in table.items() if condition)


# -- other layouts of the same run ---------------------------------------------------------------------------


def _changed(plan: Plan, section: str, refused: Counter[str] | None = None, **changes: object) -> Plan | None:
    """The plan with changes in one section of the settings; None: it fails a check.

    refused: counts the reasons.
    """
    try:
        return plan_for(plan.settings.changed(**{section: changes}), plan.shape, plan.target)
    except UserError as e:
        if refused is not None:
            refused[kind_of(str(e))] += 1
        return None


def kind_of(problem: str) -> str:
    """A problem without its numbers and its fix, the same for all layouts that have it."""
    return re.sub(r"(?<![\w.-])\d[\d.,]*(?!\w)", "N", problem.partition(";")[0])


def sweep(plan: Plan, world: int, refused: Counter[str] | None = None) -> list[Plan]:
    """All valid layouts of ``world`` trainer ranks for the model and the batch, best first.

    refused: counts why others are not valid.
    Without virtual stages; with sequence parallelism if there is tensor parallelism; expert_tensor is 1.
    Best: it fits, and is not tight; then the fewest model-parallel ranks, since they communicate; the least
    pipeline idle time; the fewest expert-parallel ranks; the most memory left. A rule of thumb: nothing was
    measured.
    """

    def order(plan: Plan) -> tuple[object, ...]:
        parallel = plan.settings.parallel
        cuts = parallel.tensor * parallel.pipeline * parallel.context
        idle = round(plan.batch.pipeline_idle, 2)
        return not plan.fits, plan.tight, cuts, idle, parallel.expert, plan.rank_total

    cuts = _cuts(world, plan.target.per_node, plan.shape.experts.count if plan.shape.experts else 1)
    plans = (_changed(plan, "parallel", refused, **cut, virtual=1, expert_tensor=1) for cut in cuts)
    return sorted((plan for plan in plans if plan is not None), key=order)


def lighter(plan: Plan) -> Plan | None:
    """The same run with the least recomputation that fits and is not tight; None: the current one is."""
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    less = kinds[: kinds.index(plan.settings.recompute)]
    plans = (_changed(plan, "memory", recompute=kind) for kind in less)
    return next((plan for plan in plans if plan is not None and plan.fits and not plan.tight), None)


def is_bound_to_a_node(settings: Settings) -> bool:
    """Whether the transport needs trainer ranks and engines on one node."""
    return not settings.engine.colocated and settings.bridge.transport != "process_group"


def smallest(plan: Plan) -> Plan | None:
    """The best layout with the fewest trainer ranks that fit; None if no number of ranks is enough.

    Does not check engines on separate GPUs. Colocated, there are at least as many ranks as engine workers.
    """
    world, engine = 1, plan.settings.engine
    least = engine.replicas * engine.tensor if engine.colocated else 1
    while world <= (plan.target.per_node if is_bound_to_a_node(plan.settings) else MOST_RANKS):
        for layout in sweep(plan, world) if world >= least else ():
            if layout.left >= 0 and not layout.gpus.why:
                return layout
        world *= 2
    return None


def smallest_engine(plan: Plan) -> int | None:
    """The smallest engine.tensor whose worker fits and holds one full sequence; colocated, within a node."""
    most = plan.target.per_node if plan.settings.engine.colocated else 32
    for tensor in (size for size in (1, 2, 4, 8, 16, 32) if size <= most):
        other = _changed(plan, "engine", tensor=tensor)
        if other is None or other.engine.kv_cache < 0 or other.engine.full_sequences < 1:
            continue
        if other.turns.get("rollout", 0) <= plan.target.nbytes:
            return tensor
    return None


def _cuts(world: int, per_node: int, experts: int) -> Iterator[dict[str, int | bool]]:
    # Tensor- and context-parallel ranks stay within a node, since links between nodes are slow.
    near = range(1, min(world, per_node) + 1)
    for tensor, context, pipeline in product(near, near, range(1, world + 1)):
        data, rest = divmod(world, tensor * pipeline * context)
        for expert in range(1, min(experts, world // pipeline) + 1) if data and not rest else ():
            if experts % expert == 0 and world // pipeline % expert == 0:
                sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
                yield {**sizes, "expert": expert, "sequence": tensor > 1}


def count(parameters: int) -> str:
    """A number of parameters in billions or millions."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 10**8 else f"{parameters / 1e6:.2f}M"

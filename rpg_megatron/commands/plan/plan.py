"""The plan of a run: sizes, batch, memory of every process by part, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rpg_megatron.commands.plan.activations import Recompute
from rpg_megatron.commands.plan.batch import BatchPlan, plan_batch
from rpg_megatron.commands.plan.colocated import SharedGpu, share_gpu
from rpg_megatron.commands.plan.engine_memory import SERVER, EngineMemory, engine_memory
from rpg_megatron.commands.plan.fused_activations import uses_fused_layers
from rpg_megatron.commands.plan.gpu_count import (
    GPUS_PER_NODE,
    Gpus,
    HostPart,
    count_gpus,
    host_parts,
    step_parts,
)
from rpg_megatron.commands.plan.gpus import DEFAULT, WITHOUT_FP8, gpu_bytes, machine_bytes
from rpg_megatron.commands.plan.trainer_memory import (
    IMPORTS,
    RESERVE,
    RankMemory,
    activation_bytes,
    rank_memory,
    worst_case_routing_bytes,
)
from rpg_megatron.config import ModelShape, Settings, read_model_shape
from rpg_megatron.config.errors import gib
from rpg_megatron.launcher.checks import LAYOUT, CheckedRun, run_checks

Device = Literal["cpu", "cuda"]

ROOM = 4 * 1024**3
"""Layouts that leave less of a GPU are marked tight, since the estimates were not measured on GPUs."""


@dataclass(frozen=True)
class Target:
    """The memory that the run must fit."""

    device: Device
    name: str
    nbytes: int
    """Bytes of one GPU, or of the machine."""


@dataclass(frozen=True)
class Plan:
    """Estimates of a run before it starts."""

    settings: Settings
    shape: ModelShape
    parameters: int
    """Number of parameters of the whole model."""
    target: Target
    batch: BatchPlan
    ranks: tuple[RankMemory, ...]
    """Per pipeline stage, a rank of data-parallel replica 0, and one of another replica, if any."""
    engine: EngineMemory
    gpus: Gpus
    host: tuple[HostPart, ...]
    """Host memory of rank 0's node: with GPUs, the ranks' host memory and the step; on a CPU, the step."""
    shared_gpu: SharedGpu | None
    """The GPU shared by a rank and an engine worker; None: separate GPUs, or a CPU."""
    activations: dict[Recompute, int]
    """Bytes on the largest rank, for each value of memory.recompute."""
    routed_to_one: int
    """Additional bytes on the largest rank if all tokens choose its experts; 0 for a dense model."""
    problems: tuple[str, ...]
    """Why the run is impossible or does not fit, each with a fix; empty: it fits."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def largest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda r: r.peak)

    @property
    def rank_total(self) -> int:
        """Bytes of the largest rank, including imports or the GPU's reserve."""
        return self.largest.peak + (IMPORTS if self.target.device == "cpu" else RESERVE)

    @property
    def need(self) -> int:
        """Bytes that the target must have; excludes engines on separate GPUs."""
        if self.target.device == "cpu":
            return self.machine_total
        return self.shared_gpu.peak if self.shared_gpu else self.rank_total

    @property
    def left(self) -> int:
        """Free bytes of the target; negative: it does not fit."""
        return self.target.nbytes - self.need

    @property
    def tight(self) -> bool:
        """Whether little of a GPU is left, see ``ROOM``."""
        return self.target.device == "cuda" and self.left < ROOM

    @property
    def implementation(self) -> str:
        """Which layers were counted: transformer_engine or local."""
        return "transformer_engine" if uses_fused_layers(self.settings, self.target.device) else "local"

    @property
    def machine_total(self) -> int:
        """On a CPU: bytes of all processes."""
        engine, parallel = self.settings.engine, self.settings.parallel
        ranks = 0
        for rank in self.ranks:
            others = parallel.data * parallel.context - 1 if any(not r.publishes for r in self.ranks) else 0
            ranks += (1 if rank.publishes else others) * parallel.tensor * (rank.peak + IMPORTS)
        step = sum(part.nbytes for part in self.host)
        return ranks + engine.replicas * (SERVER + engine.tensor * self.engine.total) + step


def make_plan(settings: Settings, gpu: str | None = None) -> Plan:
    """Plan a run for a GPU, by default for the settings' device.

    gpu: see ``gpu_bytes``. Raises UserError if the model's config.json cannot be read, or as ``plan_for``.
    """
    return plan_for(settings, read_model_shape(settings.model.path), find_target(settings, gpu))


def find_target(settings: Settings, gpu: str | None) -> Target:
    """The GPU of that name, or the settings' device."""
    if gpu is None and settings.device == "cpu":
        return Target("cpu", "this machine", machine_bytes())
    name = gpu or DEFAULT
    return Target("cuda", name, gpu_bytes(name))


def plan_for(settings: Settings, shape: ModelShape, target: Target) -> Plan:
    """The plan of one layout. Raises UserError if it fails a check (``launcher/checks.py``)."""
    parallel = settings.parallel
    run_checks(CheckedRun(settings, LAYOUT, known=shape))
    batch = plan_batch(settings, shape.max_positions)
    ranks = [
        rank_memory(
            settings,
            shape,
            stage=stage,
            publishes=publishes,
            lengths=batch.lengths,
            microbatches=batch.microbatches,
            device=target.device,
        )
        for stage in range(parallel.pipeline)
        for publishes in ((True, False) if parallel.data * parallel.context > 1 else (True,))
    ]
    engine = engine_memory(
        settings, shape, longest=batch.context, device=target.device, gpu_bytes=target.nbytes
    )
    largest, on_gpus = max(ranks, key=lambda r: r.peak), target.device == "cuda"
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    activations = {
        kind: activation_bytes(
            settings, shape, largest.stage, batch.lengths, batch.microbatches, kind, target.device
        )
        for kind in kinds
    }
    gpus = count_gpus(settings)
    routed_to_one = worst_case_routing_bytes(
        settings, shape, largest.stage, batch.lengths, batch.microbatches, target.device
    )
    draft = Plan(
        settings=settings,
        shape=shape,
        parameters=_parameters(shape),
        target=target,
        batch=batch,
        ranks=tuple(ranks),
        engine=engine,
        gpus=gpus,
        host=host_parts(settings, batch, ranks, gpus)
        if on_gpus
        else tuple(step_parts(settings, batch, settings.parallel.world)),
        shared_gpu=share_gpu(settings, largest, engine) if settings.engine.colocated and on_gpus else None,
        activations=activations,
        routed_to_one=routed_to_one,
        problems=(),
        warnings=(),
    )
    return replace(draft, problems=tuple(_problems(draft)), warnings=tuple(_warnings(draft)))


def _parameters(shape: ModelShape) -> int:
    one = Settings.model_validate({"model": {"path": "."}, "data": {"path": "."}})
    return rank_memory(
        one, shape, stage=0, publishes=True, lengths=[1], microbatches=1, device="cuda"
    ).parameters


def _problems(plan: Plan) -> list[str]:
    settings, engine, target = plan.settings, plan.engine, plan.target
    found = []
    if target.device == "cuda" and plan.gpus.why:
        found.append(f"ranks and engines cannot be placed on nodes of {GPUS_PER_NODE} GPUs: {plan.gpus.why}")
    if settings.precision.fp8 is not None and target.name.strip().lower() in WITHOUT_FP8:
        found.append(
            f"precision.fp8 needs compute capability 9.0 (Hopper) or later, which {target.name} lacks; set "
            "precision.fp8=null"
        )
    if target.device == "cpu":
        if plan.machine_total > target.nbytes:
            found.append(
                f"all processes together need {gib(plan.machine_total)}, {target.name} has "
                f"{gib(target.nbytes)}; lower training.tokens_per_microbatch or engine.kv_cache_gib"
            )
    elif plan.shared_gpu is not None:
        found += _shared_gpu_problems(plan, plan.shared_gpu)
    else:
        if plan.rank_total > target.nbytes:
            found.append(
                f"a trainer rank needs {gib(plan.rank_total)}, {target.name} has {gib(target.nbytes)}"
            )
        if engine.kv_cache >= 0 and engine.total > target.nbytes:
            found.append(
                f"an engine worker needs {gib(engine.total)}, {target.name} has {gib(target.nbytes)}; "
                "lower --gpu-memory-utilization in engine.arguments"
            )
        if engine.kv_cache < 0:
            found.append(
                f"an engine worker needs {gib(engine.weights + engine.running)} without a KV cache, and "
                f"vLLM uses {engine.utilisation:.0%} of {gib(target.nbytes)}; raise engine.tensor"
            )
    if engine.kv_cache >= 0 and engine.full_sequences < 1:
        more = "engine.kv_cache_gib" if engine.utilisation is None else "engine.tensor"
        found.append(
            f"the KV cache holds {engine.kv_tokens:,} tokens, one sequence may have "
            f"{engine.sequence_tokens:,}; raise {more} or lower rollout.max_response_tokens"
        )
    return found


def _shared_gpu_problems(plan: Plan, gpu: SharedGpu) -> list[str]:
    found, target = [], plan.target
    if (nbytes := gpu.total("update")) > target.nbytes:
        found.append(
            f"during an update a GPU holds {gib(nbytes)}, of which {gib(plan.rank_total)} are a trainer "
            f"rank's; {target.name} has {gib(target.nbytes)}"
        )
    if (nbytes := gpu.total("rollout")) > target.nbytes:
        found.append(
            f"while engines sample, a GPU holds {gib(nbytes)}, of which {gib(plan.engine.total)} are an "
            f"engine worker's; {target.name} has {gib(target.nbytes)}; lower engine.kv_cache_gib, or raise "
            "engine.tensor or parallel.tensor"
        )
    return found


def _warnings(plan: Plan) -> list[str]:
    found, engine, parallel = list(plan.settings.notes()), plan.engine, plan.settings.parallel
    wanted = min(
        plan.settings.engine.max_sequences, -(-plan.batch.sequences // plan.settings.engine.replicas)
    )
    if 1 <= engine.full_sequences < wanted:
        found.append(
            f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, but {wanted} may run "
            "at once: vLLM will preempt and recompute some"
        )
    if parallel.pipeline > 1 and plan.batch.pipeline_idle > 0.25:
        found.append(
            f"pipeline ranks idle for {plan.batch.pipeline_idle:.0%} of an update with "
            f"{plan.batch.microbatches} micro-batches; lower training.tokens_per_microbatch or "
            "training.minibatches"
        )
    if plan.settings.optimizer.distributed and parallel.data * parallel.context == 1:
        found.append("optimizer.distributed shards nothing with one replica")
    if plan.shared_gpu is not None:
        found.append("engine.colocated: memory per turn is computed, not measured")
    if plan.routed_to_one:
        verdict = "which also fits" if plan.routed_to_one <= plan.left else "which does not fit"
        found.append(
            "the load of experts is assumed to be even; if all tokens of the expert-parallel ranks chose the "
            f"experts of one rank, an update would need {gib(plan.routed_to_one)} more there, {verdict}"
        )
    if plan.tight and plan.left >= 0:
        found.append(
            f"{gib(plan.left)} of a GPU are left, less than {gib(ROOM)}: these estimates were not measured "
            "on a GPU; choose a layout with more room (--sweep)"
        )
    if plan.settings.precision.fp8 is not None and plan.target.device == "cpu":
        found.append("precision.fp8: the memory of its emulation on a CPU is not counted")
    return found


def count(parameters: int) -> str:
    """A number of parameters in billions or millions."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 10**8 else f"{parameters / 1e6:.2f}M"

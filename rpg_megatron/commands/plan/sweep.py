"""Plans other layouts of the same run, and ranks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rpg_megatron.commands.plan.activations import Recompute
from rpg_megatron.commands.plan.gpu_count import GPUS_PER_NODE
from rpg_megatron.commands.plan.plan import Plan, Target, plan_for
from rpg_megatron.commands.plan.trainer_memory import recomputation
from rpg_megatron.config import ModelShape, Settings, UserError

MOST_RANKS = 1024


@dataclass(frozen=True)
class Candidate:
    """A layout and its plan."""

    plan: Plan

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key, best first.

        It fits, and is not tight (``plan.ROOM``); then the fewest model-parallel ranks, since they
        communicate; the least pipeline idle time; the fewest expert-parallel ranks; the most memory left. A
        rule of thumb: nothing was measured.
        """
        p = self.plan
        parallel = p.settings.parallel
        cuts = parallel.tensor * parallel.pipeline * parallel.context
        idle = round(p.batch.pipeline_idle, 2)
        return (not p.fits, p.tight, cuts, idle, parallel.expert, p.rank_total)

    @property
    def overrides(self) -> str:
        """The settings that select it, for the command line."""
        p = self.plan.settings.parallel
        more = ("expert", "expert_tensor") if self.plan.shape.experts else ()
        return " ".join(
            f"parallel.{name}={str(getattr(p, name)).lower()}"
            for name in ("tensor", "pipeline", "context", "data", "sequence", *more)
        )


def sweep(settings: Settings, shape: ModelShape, target: Target, world: int) -> list[Candidate]:
    """All valid layouts of ``world`` trainer ranks for the model and the batch, best first.

    Without virtual stages; with sequence parallelism if there is tensor parallelism; expert_tensor is 1.
    """
    found = []
    for tensor, pipeline, context, data, expert in _cuts(world, shape.experts.count if shape.experts else 1):
        parallel = settings.parallel.model_copy(
            update={
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "data": data,
                "virtual": 1,
                "sequence": tensor > 1,
                "expert": expert,
                "expert_tensor": 1,
            }
        )
        try:
            plan = plan_for(settings.model_copy(update={"parallel": parallel}), shape, target)
        except UserError:
            continue  # it fails a check
        found.append(Candidate(plan))
    return sorted(found, key=lambda c: c.key)


def lighter(settings: Settings, shape: ModelShape, target: Target) -> Plan | None:
    """The same run with the least recomputation that fits and is not tight; None: the current one is."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for kind in kinds[: kinds.index(recomputation(settings))]:
        memory = settings.memory.model_copy(update={"recompute": kind})
        try:
            plan = plan_for(settings.model_copy(update={"memory": memory}), shape, target)
        except UserError:
            continue
        if plan.fits and not plan.tight:
            return plan
    return None


def is_bound_to_a_node(settings: Settings) -> bool:
    """Whether the transport needs trainer ranks and engines on one node."""
    return not settings.engine.colocated and settings.bridge.transport != "process_group"


def smallest(settings: Settings, shape: ModelShape, target: Target) -> Candidate | None:
    """The best layout with the fewest trainer ranks that fit; None if no number of ranks is enough.

    Does not check engines on separate GPUs. Colocated, there are at least as many ranks as engine workers.
    """
    world, engine = 1, settings.engine
    least = engine.replicas * engine.tensor if engine.colocated else 1
    while world <= (GPUS_PER_NODE if is_bound_to_a_node(settings) else MOST_RANKS):
        for candidate in sweep(settings, shape, target, world) if world >= least else ():
            if candidate.plan.need <= target.nbytes and not candidate.plan.gpus.why:
                return candidate
        world *= 2
    return None


def smallest_engine(settings: Settings, shape: ModelShape, target: Target) -> int | None:
    """The smallest engine.tensor whose worker fits and holds one sequence of full length."""
    for tensor in (1, 2, 4, 8, 16):
        engine = settings.engine.model_copy(update={"tensor": tensor})
        try:
            plan = plan_for(settings.model_copy(update={"engine": engine}), shape, target)
        except UserError:
            continue
        room = plan.shared_gpu is None or plan.shared_gpu.total("rollout") <= target.nbytes
        if room and plan.engine.kv_cache >= 0 and plan.engine.full_sequences >= 1:
            return tensor
    return None


def _cuts(world: int, experts: int) -> Iterator[tuple[int, int, int, int, int]]:
    # Tensor- and context-parallel ranks stay within a node, since links between nodes are slow.
    for tensor in range(1, min(world, GPUS_PER_NODE) + 1):
        for pipeline in range(1, world // tensor + 1):
            for context in range(1, min(world // (tensor * pipeline), GPUS_PER_NODE) + 1):
                if world % (tensor * pipeline * context):
                    continue
                for expert in range(1, min(experts, world // pipeline) + 1):
                    if experts % expert == 0 and world // pipeline % expert == 0:
                        yield tensor, pipeline, context, world // (tensor * pipeline * context), expert

"""Trainer: the parts of a step that need no engine (batch distribution, log-probs, updates, anchor).

Methods are collective unless they say otherwise: every rank calls them in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.checkpoints.hf_files import StoredTensor
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.peft import check_adapter
from rpg_megatron.checkpoints.run_folder import ADAPTERS, MODEL, step_folder
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.config.reward import KLRewardSettings
from rpg_megatron.data.batch_index import BatchIndex, TrajectorySource, index_of
from rpg_megatron.data.packing import Plan, Prompt, count_shared, pack_rows, plan_batches
from rpg_megatron.data.row_layout import shareable
from rpg_megatron.data.trajectory import Floats, Trajectory
from rpg_megatron.models.lora import AdaptedMapping, AdapterMapping, split_parameters
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.objectives import metric_key, takes_maximum
from rpg_megatron.objectives.advantages import response_kl
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.expert_load import counted_routes, counts_matrix, load_metrics
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Accumulated, Policy, UpdateStats
from rpg_megatron.policy.router_replay import change_metrics, count_changes
from rpg_megatron.policy.schedules import build_schedule
from rpg_megatron.policy.teacher import HeldTeacher
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.system.collectives import (
    barrier,
    broadcast_object,
    control_group,
    gather_objects,
    gather_on_first,
    max_over_ranks,
    sum_arrays,
)
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.advantages import build_advantages
from rpg_megatron.training.batch_scatter import BatchScatter, ReplicaBatch, iter_trajectories
from rpg_megatron.training.checkpoint_saver import load_run
from rpg_megatron.training.loss import build_aggregator, build_loss
from rpg_megatron.training.off_policy import correction_by_lag, off_policy_metrics

_SHOWN = 3  # maximum parameters listed in a message


@dataclass
class Batch:
    """A step's trajectories: this replica's, in mini- and micro-batches."""

    minibatches: ReplicaBatch
    """This replica's. Every replica has the same number of micro-batches; some may be empty."""
    mine: list[Trajectory]
    """Leaders (``Mesh.leads``): the trajectories of ``minibatches`` in the order of the prompts, with all
    their fields. Elsewhere empty.
    """
    index: BatchIndex | None
    """Rank 0: lengths and rewards of all trajectories. Elsewhere None."""
    shared: tuple[int, int] = (0, 0)
    """Rank 0: of ``packing.count_shared``."""
    probes: ReplicaBatch = field(default_factory=list)
    """With ``rollout.probed``: this replica's part of the responses that only the guard on mismatch compares,
    as one mini-batch. Like those of ``minibatches``.
    """
    my_probes: list[Trajectory] | None = None
    """Leaders: the trajectories of ``probes``. Elsewhere empty. None without ``rollout.probed``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step so far; complete on rank 0."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """Rank 0: the sampler's state after these rollouts."""
    failures: FailureCount = field(default_factory=FailureCount)
    """Rank 0: failures of the reward."""
    started: Accumulated | None = None
    """The first update after ``Trainer.start_update``: its gradients."""
    compared: list[Trajectory] | None = None
    """Leaders: trajectories with the trainer's log-probs as ``old``, for the guard on mismatch. None: those
    of ``mine``."""
    totals: dict[str, Any] = field(default_factory=dict)
    """Sums behind metrics that are collected in several parts."""

    def add(self, name: str, sums: Any) -> Any:
        """Add sums over all ranks to those of the step's other parts; returns the new sums."""
        self.totals[name] = self.totals[name] + sums if name in self.totals else sums
        return self.totals[name]


class TooManySkippedUpdates(UserError):
    """``guards.skipped_updates`` is reached; raised on every rank."""


class Trainer:
    """The policy on this rank, its loss, and the anchor if its weights are held separately."""

    def __init__(self, settings: Settings, mesh: Mesh, device: torch.device):
        self.settings, self.mesh, self._device = settings, mesh, device
        self.shape = read_model_shape(settings.model.path)
        self.layout = mapping_for(self.shape)
        self.adapters = None if settings.lora is None else AdapterMapping(self.shape, settings.lora)
        self.policy = Policy(settings, self.shape, mesh, device, self._load_weights)
        held = settings.anchor.type != "old"
        self.anchor = (
            HeldAnchor([p for _, p in self.policy.trained_parameters()], settings.anchor) if held else None
        )
        self.teacher = self._held_teacher()
        self._scatter = BatchScatter(mesh)
        self._loss, self._aggregator = build_loss(settings), build_aggregator(settings)
        self._advantages = build_advantages(settings.advantage)
        self._learning_rate = build_schedule(settings.optimizer, settings.training.steps)
        self._old_from = settings.old_from
        if mesh.rank == 0 and settings.sft is None:
            why = next(settings.reasons_for_pass(), "") if settings.training.old == "auto" else ""
            print(f"training.old: {self._old_from}" + (f" ({why})" if why else ""), flush=True)
        self.skipped_updates = 0
        """Consecutive skipped updates, up to the last update."""

    def _load_weights(self, policy: Policy) -> None:
        model, adapters = split_parameters(dict(policy.loadable_parameters()))
        self._load(self.settings.model.path, model.items(), self.layout)
        if self.adapters is not None and (folder := self.settings.model.adapter) is not None:
            self._load(folder, adapters.items(), self.adapters, check_adapter(folder, self.adapters))

    @property
    def published(self) -> tuple[ModelMapping, Collection[str] | None]:
        """What engines get: the mapping of ``policy.served``, and the tensors that change (None: all)."""
        if self.adapters is None or not self.settings.serves_adapters:
            return self.layout, None
        return AdaptedMapping(self.layout, self.adapters), self.adapters.hf_tensors().keys()

    def _held_teacher(self) -> HeldTeacher | None:
        """The teacher, if the ranks hold one."""
        if self.settings.teacher is None or self.settings.teacher.path is None:
            return None
        path = self.settings.teacher.path
        shape = read_model_shape(path)

        def load(teacher: HeldTeacher) -> None:
            self._load(path, teacher.named_parameters(), mapping_for(shape))

        return HeldTeacher(self.settings, shape, self.mesh, self._device, load)

    def _load(
        self,
        path: Path,
        parameters: Iterable[tuple[str, torch.Tensor]],
        layout: ModelMapping,
        stored: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        load_hf_weights(
            path,
            parameters,
            layout,
            tensor=self.mesh.tensor,
            tensor_rank=self.mesh.tensor_rank,
            vocab_multiple=self.settings.model.vocab_multiple,
            experts=self.mesh.experts,
            stored=stored,
        )
        barrier()  # faster ranks wait here, not in the first NCCL collective, which would occupy their GPU

    def load(self, checkpoint: Path, *, trusted: bool = False) -> dict[str, Any]:
        """Load a checkpoint of a run; returns the contents of its ``state.json``. Raises UserError.

        trusted: see ``checkpoints.megatron.load_weights``.
        """
        state = load_run(checkpoint, self.policy, self.anchor, trusted=trusted)
        self.skipped_updates = state.get("skipped_updates", 0)
        return state

    def export(self, run_dir: Path, step: int, *, saved: bool = False) -> Path:
        """Write the weights of a step to ``hf/step_NNNNNN``, as ``export`` says; returns the folder.

        Those of adapters are written twice: merged there, and in PEFT's format to ``adapters/step_NNNNNN``.

        saved: load that step's checkpoint first; training cannot continue after that.
        """
        if saved:
            self.policy.load(step_folder(run_dir, step) / MODEL, trusted=True)
        settings, out = self.settings.export, run_dir / "hf" / f"step_{step:06d}"
        out.parent.mkdir(exist_ok=True)
        self.write_checkpoint(out, settings.dtype, int(settings.max_shard_gib * 1024**3))
        if self.adapters is not None:
            export_adapter(
                run_dir / ADAPTERS / out.name,
                split_parameters(dict(self.policy.named_parameters()))[1],
                self.adapters,
                self.mesh.coordinates(self.settings.model.vocab_multiple),
                self.settings.model.path,
                dtype=torch_dtype(settings.dtype or self.settings.precision.dtype),
            )
        return out

    def write_checkpoint(
        self, out: Path, dtype: str | None = None, max_shard_bytes: int = 4 * 1024**3
    ) -> None:
        """Write the weights, merged, as a Hugging Face checkpoint.

        dtype: float32 or bfloat16; None: the policy's.
        """
        self.policy.served.refresh()  # a run without engines has not done it
        written = torch_dtype(dtype or self.settings.precision.dtype)
        export_hf(
            out,
            self.settings.model.path,
            self.policy.complete_weights(written),
            self.layout,
            self.mesh.coordinates(self.settings.model.vocab_multiple),
            dtype=written,
            max_shard_bytes=max_shard_bytes,
            replace=True,  # a run that was killed right after its export exports again when resumed
        )

    def prepare_batch(self, index: BatchIndex | None, source: TrajectorySource | None) -> Batch:
        """Compute advantages from rewards, and give each replica its part of the step.

        index: on rank 0. source: on leaders, which fetch their trajectories from it. If a leader cannot, all
        ranks raise.
        """
        advantages = np.zeros(0)
        if index is not None:
            advantages = self._advantages_of(index)
        plan = self._plan(index, self.settings.minibatches)
        minibatches, trajectories = self._scatter.scatter(plan, index, advantages, source)
        prompts = None if index is None else self._prompts(index)
        shared = (0, 0) if prompts is None else count_shared(plan, prompts)
        return Batch(minibatches, trajectories, index, shared=shared)

    def add_probes(self, batch: Batch, index: BatchIndex | None, source: TrajectorySource | None) -> None:
        """Give each replica its part of the step's probes; parameters and errors as in ``prepare_batch``.

        index: None on rank 0 means that there are none.
        """
        if self.mesh.rank == 0 and index is None:
            index = index_of(())
        advantages = np.zeros(0 if index is None else len(index))
        batch.probes, batch.my_probes = self._scatter.scatter(self._plan(index, 1), index, advantages, source)

    def _advantages_of(self, index: BatchIndex, penalty: NDArray[np.float64] | None = None) -> NDArray[Any]:
        """Advantage of each trajectory, [N]: of its response, which may have several.

        penalty: to be subtracted from the reward of each response.
        """
        starts = index.starts
        rows = np.diff(np.append(starts, len(index)))
        rewards = index.reward[starts] - (0.0 if penalty is None else penalty)
        sampled = np.add.reduceat(index.sampled, starts) if len(starts) else index.sampled
        return np.repeat(self._advantages(rewards, index.group[starts], sampled), rows)

    def _plan(self, index: BatchIndex | None, minibatches: int) -> Plan:
        if index is None:
            return []
        return plan_batches(
            (index.prompt_length + index.response_length).tolist(),
            minibatches=minibatches,
            starts=index.starts.tolist(),
            prompts=self._prompts(index),
            data=self.mesh.data,
            budget=self.settings.training.tokens_per_microbatch,
            context=self.mesh.context,
            attention_length=self.shape.attention_length,
        )

    def _prompts(self, index: BatchIndex) -> list[Prompt] | None:
        """Which trajectories may share prompts: the first of each response of a group."""
        least = self.settings.training.shared_from
        if least is None:
            return None
        columns = (index.group, index.branch, index.prompt_length, index.response_length)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [(g, 0 if branch else shareable(p, r, least)) for g, branch, p, r in rows]

    def compute_log_probs(self, batch: Batch) -> None:
        """Set ``old`` and ``anchor`` of this rank's trajectories, and ``old`` of its probes.

        With ``reward.kl`` also their advantages, which depend on both. With ``training.old`` update,
        ``start_update`` sets ``old`` of the first mini-batch; with engine, ``old`` is ``behaviour``.
        """
        parts = {"pass": batch.minibatches, "update": batch.minibatches[1:], "engine": []}[self._old_from]
        micro_batches = [self.policy.pack(row) for row in self._rows_to_score(parts)] if parts else []
        probes = [self.policy.pack(row) for row in chain.from_iterable(batch.probes)]
        with self._counted(batch, micro_batches):
            scored = self.policy.logprobs([*micro_batches, *probes]) if micro_batches or probes else []
        self._take_scores(batch, micro_batches, scored[: len(micro_batches)])
        _set_old(probes, scored[len(micro_batches) :])
        if self._old_from == "engine":
            for t in iter_trajectories(batch.minibatches):
                t.old = t.behaviour
        self._set_anchor(batch, micro_batches)
        if self.settings.reward.kl is not None:
            self._subtract_kl(batch, self.settings.reward.kl)
        if self.policy.replayed is not None and (compared := probes or micro_batches):
            batch.metrics |= self._compare_routes(compared[:1], scored[-len(probes) :] if probes else scored)

    def start_update(self, batch: Batch) -> None:
        """Accumulate the gradients of the first update, whose forward pass gives log-probs.

        No weight changes. With ``training.old`` update, sets ``old`` of the first mini-batch; with pass,
        there is no effect.
        """
        if self._old_from == "pass":
            return
        micro_batches = [self.policy.pack(row) for row in batch.minibatches[0]]
        sets_old = self._old_from == "update"
        with self._counted(batch, micro_batches):
            batch.started = self.policy.accumulate(
                micro_batches, self._loss, self._aggregator, scored=True, sets_old=sets_old
            )
        scores = batch.started.scores
        if sets_old:
            self._take_scores(batch, micro_batches, scores)
            for t in iter_trajectories(batch.minibatches[:1]):
                t.anchor = t.anchor if len(t.anchor) else t.old
        else:
            self._add_entropies(batch, micro_batches, scores)
            own = [replace(t, old=logp.numpy()) for t, logp in _logps_of(micro_batches, scores)]
            batch.compared = own if self.mesh.leads else []
        if self.policy.replayed is not None and "routes/own_mismatch_mean" not in batch.metrics:
            batch.metrics |= self._compare_routes(micro_batches[:1], scores)

    @contextmanager
    def _counted(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Within the block, count the experts of a forward pass over these; adds the metrics."""
        experts = self.shape.experts
        if experts is None:
            yield
            return
        for micro in micro_batches:
            if micro.packed.routes is not None:
                micro.packed.routes.start_counting()
        with counted_routes(self.policy.chunks) as routes:
            yield
        counts = batch.add("routes", sum_arrays(counts_matrix(routes, self.shape)))
        batch.metrics |= load_metrics(counts, experts.layers)
        if self.policy.replayed is not None:
            changes = batch.add("changes", count_changes(micro_batches, self.mesh))
            batch.metrics |= change_metrics(changes, self.policy.replayed)

    def _take_scores(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
    ) -> None:
        """Set ``old`` of trajectories. scores: as ``Policy.logprobs`` returns them."""
        _set_old(micro_batches, scores)
        self._add_entropies(batch, micro_batches, scores)

    def _add_entropies(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
    ) -> None:
        entropy = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro, values in zip(micro_batches, scores, strict=True) if self.mesh.reports else ():
            entropies = values[1].index_select(0, micro.loss_positions)
            entropy += torch.stack([entropies.double().sum(), micro.mask.sum().double()])
        dist.all_reduce(entropy)
        total = batch.add("entropy", entropy)
        batch.metrics["policy/entropy"] = (total[0] / total[1].clamp(min=1)).item()

    def _set_anchor(self, batch: Batch, micro_batches: list[MicroBatch]) -> None:
        """Set ``anchor`` of the trajectories that have ``old``, or of all if other weights compute it.

        micro_batches: those of the pass.
        """
        if self._old_from == "engine":
            micro_batches = []
        held = self.anchor is not None or (self.teacher is not None and not self.settings.full_divergence)
        if held:
            done = {"pass": [], "update": batch.minibatches[:1], "engine": batch.minibatches}[self._old_from]
            rows = self._rows_to_score(done) if done else []
            rest = [self.policy.pack(row) for row in rows]
            micro_batches = [*micro_batches, *rest]
            if self.anchor:
                with self.anchor.swapped_in():
                    anchor = self.policy.logprobs([micro.without_routes() for micro in micro_batches])
            else:
                assert self.teacher is not None
                anchor = self.teacher.logprobs(micro_batches)
            for t, logp in _logps_of(micro_batches, anchor):
                t.anchor = logp.numpy()
            return
        for t in iter_trajectories(batch.minibatches):
            if len(t.old) and not len(t.anchor):  # else a teacher's server has given it
                t.anchor = t.old

    def score_probes(self, batch: Batch) -> list[Floats]:
        """Set ``old`` of this rank's probes alone; returns that of ``my_probes``."""
        probes = [self.policy.pack(row) for row in chain.from_iterable(batch.probes)]
        _set_old(probes, self.policy.logprobs(probes))
        return [t.old for t in batch.my_probes or ()]

    def mean_loss(self, batch: Batch) -> tuple[float, int]:
        """Mean of -log p over the trained tokens of a batch, in nats, and their number."""
        micro_batches = [self.policy.pack(row) for row in self._rows_to_score(batch.minibatches)]
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro, values in zip(micro_batches, self.policy.logprobs(micro_batches), strict=True):
            if self.mesh.reports:
                logps = values[0].index_select(0, micro.loss_positions)
                sums += torch.stack([-logps.double().sum(), micro.mask.sum().double()])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item(), int(sums[1])

    def _subtract_kl(self, batch: Batch, settings: KLRewardSettings) -> None:
        """Set the advantages to those of rewards minus the KL of each response to the anchor.

        ``reward`` of the trajectories stays the grader's.
        """
        divergences = [
            (t.group, t.sample, response_kl(t.old[t.mask], t.anchor[t.mask], settings.estimator))
            for t in batch.mine
        ]
        everyone = gather_on_first(divergences, list[tuple[int, int, float]])
        kl_of = Counter[tuple[int, int]]()
        for group, sample, kl in chain.from_iterable(everyone):
            kl_of[group, sample] += kl
        advantages: dict[tuple[int, int], float] = {}
        if batch.index is not None:
            places = list(zip(batch.index.group.tolist(), batch.index.sample.tolist(), strict=True))
            kls = np.array([kl_of[places[start]] for start in batch.index.starts])
            penalty = settings.coefficient * kls
            new = self._advantages_of(batch.index, penalty)
            advantages = dict(zip(places, new.tolist(), strict=True))
            batch.metrics |= {"kl/response": float(kls.mean()), "reward/kl": float(-penalty.mean())}
        advantages = broadcast_object(advantages, dict[tuple[int, int], float])
        for t in iter_trajectories(batch.minibatches):
            t.advantage = advantages[t.group, t.sample]

    def _compare_routes(
        self, micro_batches: Sequence[MicroBatch], replayed: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Mean and maximum of |old - behaviour|, in nats, with replayed routes and with the router's own.

        replayed: scores with replay; the micro-batches are scored again without. One on each data rank is
        enough, at the cost of one forward pass.
        """
        sums = torch.zeros(3, dtype=torch.float64)
        largest = torch.zeros(2, dtype=torch.float64)
        unreplayed = self.policy.logprobs([micro.without_routes() for micro in micro_batches])
        scored = replayed[: len(micro_batches)]
        both = zip(_logps_of(micro_batches, scored), _logps_of(micro_batches, unreplayed), strict=True)
        for (t, with_replay), (_, own) in both if self.mesh.reports else ():
            pair = torch.stack([with_replay, own])[:, t.mask] - torch.from_numpy(t.behaviour[t.mask])
            gaps = pair.double().abs()
            sums += torch.cat([gaps.sum(1), torch.tensor([gaps.size(1)])])
            if gaps.numel():
                largest = torch.maximum(largest, gaps.amax(1))
        dist.all_reduce(sums, group=control_group())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=control_group())
        replayed_mean, own_mean = (sums[:2] / sums[2].clamp(min=1)).tolist()
        replayed_max, own_max = largest.tolist()
        return {
            "routes/replayed_mismatch_mean": replayed_mean,
            "routes/own_mismatch_mean": own_mean,
            "routes/replayed_mismatch_max": replayed_max,
            "routes/own_mismatch_max": own_max,
        }

    def _rows_to_score(self, minibatches: ReplicaBatch) -> list[list[Trajectory]]:
        """This rank's trajectories packed into rows of the token budget, regardless of mini-batches.

        Every data rank has the same number of rows; some may be empty.
        """
        if len(minibatches) == 1:
            return minibatches[0]
        trajectories = list(iter_trajectories(minibatches))
        budget, context = self.settings.training.tokens_per_microbatch, self.mesh.context
        least = self.settings.training.shared_from
        prompts: list[Prompt] | None = None
        if least is not None:
            prompts = [
                (t.prompt.tobytes(), shareable(len(t.prompt), len(t.response), least)) for t in trajectories
            ]
        rows = [
            [trajectories[i] for i in row]
            for row in pack_rows([t.length for t in trajectories], budget, context, prompts)
        ]
        return rows + [[] for _ in range(max_over_ranks(len(rows)) - len(rows))]

    def update(self, step: int, batch: Batch, on_update: Callable[[int, int], None]) -> None:
        """One update for each mini-batch, ``training.epochs`` times, then a refresh of the anchor if due.

        Adds the updates' metrics to the batch's. on_update: called with (done, total) before each update.
        Raises TooManySkippedUpdates after ``guards.skipped_updates`` consecutive skipped updates.
        """
        if batch.started is None:
            self.start_update(batch)
        lr = self._learning_rate(step)
        updates: list[UpdateStats] = []
        with self.policy.updating():
            passes = batch.minibatches * self.settings.training.epochs
            for i, minibatch in enumerate(passes):
                on_update(i, len(passes))
                if i == 0 and batch.started is not None:
                    updates.append(self.policy.step(batch.started, lr))
                    self._count_skipped(f"step {step}, update 1 of {len(passes)}", updates[-1])
                    continue
                micro_batches = [self.policy.pack(micro) for micro in minibatch]
                if self.teacher and self.settings.full_divergence is not None:
                    micro_batches = self.teacher.with_rows(micro_batches, self.settings.full_divergence)
                updates.append(self.policy.update(micro_batches, self._loss, self._aggregator, lr))
                self._count_skipped(f"step {step}, update {i + 1} of {len(passes)}", updates[-1])
        done = [u for u in updates if not u.skipped]
        if self.anchor and done:
            self.anchor.after_step(len(done), _mean_kl(done, self.settings))
        batch.metrics |= self._summarise(updates) | {"lr": lr}
        if self.settings.sft is None:
            batch.metrics |= off_policy_metrics(batch.mine, self.settings)
        if self.settings.rollout.ahead and self.settings.correction is not None:
            batch.metrics |= correction_by_lag(batch.mine, step - 1, self.settings)

    def _count_skipped(self, where: str, update: UpdateStats) -> None:
        self.skipped_updates = self.skipped_updates + 1 if update.skipped else 0
        if not update.skipped:
            return
        limit = self.settings.guards.skipped_updates
        names = [
            f"{name} on rank {rank}"
            for rank, names in enumerate(gather_objects(self.policy.nonfinite_gradients(), list[str]))
            for name in names
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = ", ".join(names[:_SHOWN]) + more
        message = (
            f"{where}: the gradient is not finite (norm {update.grad_norm}; {listed}); the update is skipped"
        )
        if self.skipped_updates >= limit:
            raise TooManySkippedUpdates(
                f"{message}, like {limit - 1} before it in a row (guards.skipped_updates: {limit}). Lower "
                "optimizer.lr or objective.beta, and check rewards and log-probs of the step in rollouts/; "
                "skipped updates changed no weights, so the newest checkpoint is usable"
            )
        if self.mesh.rank == 0:
            print(f"warning: {message}, {self.skipped_updates} in a row; {limit} end the run", flush=True)

    def _summarise(self, updates: Sequence[UpdateStats]) -> dict[str, float]:
        """Metrics of a step's updates; means exclude skipped ones."""
        done = [u for u in updates if not u.skipped]
        row = {"policy/skipped_updates": float(len(updates) - len(done))}
        if not done:
            return row
        tokens = sum(u.tokens for u in done)

        def mean(values: list[float]) -> float:
            return sum(v * u.tokens for v, u in zip(values, done, strict=True)) / max(tokens, 1)

        row |= {
            "policy/loss": sum(u.loss for u in done) / len(done),
            "policy/loss_abs": mean([u.abs_loss for u in done]),
            "policy/grad_norm": sum(u.grad_norm for u in done) / len(done),
            "policy/grad_norm_first": done[0].grad_norm,
        }
        for name in dict.fromkeys(name for u in done for name in u.metrics):
            values = [u.metrics.get(name, 0.0) for u in done]
            row[metric_key(name)] = max(values) if takes_maximum(name) else mean(values)
        if aux_losses := [u.aux_loss for u in done if u.aux_loss is not None]:
            row["moe/aux_loss"] = sum(aux_losses) / len(aux_losses)
        if self.anchor:
            row["kl/anchor_refreshes"] = float(self.anchor.refreshes)
        return row


def _mean_kl(updates: Sequence[UpdateStats], settings: Settings) -> float:
    """Mean of the metric ``kl`` over tokens; 0 if it is missing. Raises UserError if the anchor needs it."""
    if settings.anchor.type == "kl_trigger" and any(u.tokens and "kl" not in u.metrics for u in updates):
        raise UserError(
            f"anchor.type kl_trigger: {settings.objective.type} returns no metric 'kl' (nats, per token), "
            "which triggers the anchor's updates; return it, or use anchor.type every"
        )
    tokens = sum(u.tokens for u in updates)
    return sum(u.metrics.get("kl", 0.0) * u.tokens for u in updates) / max(tokens, 1)


def _set_old(micro_batches: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> None:
    """Set ``old`` of the trajectories in these micro-batches, scored by ``Policy.logprobs``."""
    for t, logp in _logps_of(micro_batches, outputs):
        t.old = logp.numpy()


def _logps_of(
    micro_batches: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]
) -> Iterator[tuple[Trajectory, torch.Tensor]]:
    """Each trajectory with its response's log-probs, float32 [R], on the CPU."""
    for micro, row in zip(micro_batches, _logps_to_host(outputs) if outputs else [], strict=True):
        for t, logp in micro.split(row):
            yield t, logp.clone()


def _logps_to_host(outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The log-probs in the results of ``Policy.logprobs``, on the CPU, with one device synchronisation."""
    return torch.split(torch.cat([x[0] for x in outputs]).cpu(), [x.size(1) for x in outputs])

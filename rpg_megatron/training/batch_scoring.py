"""The log-probs of a step: of the policy, of its anchor, and what follows from both.

Methods are collective unless they say otherwise: every rank calls them in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.config.reward import KLRewardSettings
from rpg_megatron.data.packing import Prompt, pack_rows
from rpg_megatron.data.row_layout import routed_by, shareable
from rpg_megatron.data.trajectory import Floats, Trajectory
from rpg_megatron.objectives.advantages import response_kl
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.expert_load import counted_routes, counts_matrix, load_metrics
from rpg_megatron.policy.logprobs import ENTROPY, LOGP
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.policy import Policy
from rpg_megatron.policy.router_replay import change_metrics, count_changes
from rpg_megatron.policy.teacher import HeldTeacher
from rpg_megatron.system.collectives import (
    broadcast_object,
    control_group,
    gather_on_first,
    max_over_ranks,
    sum_arrays,
)
from rpg_megatron.training.advantages import Advantages, advantages_of
from rpg_megatron.training.batch import Batch, ProbeBatch
from rpg_megatron.training.batch_scatter import ReplicaBatch, iter_trajectories


class BatchScorer:
    """Computes the log-probs that a step needs, on this rank."""

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        anchor: HeldAnchor | None,
        teacher: HeldTeacher | None,
        advantages: Advantages,
    ) -> None:
        self._settings, self._mesh, self._device = policy.settings, policy.mesh, policy.device
        self._policy, self._shape, self._anchor, self._teacher = policy, shape, anchor, teacher
        self._advantages = advantages
        self._old_from = self._settings.old_from
        self._without_pass = {"pass": 0, "update": 1, "engine": None}[self._old_from]
        """Number of mini-batches whose ``old`` needs no pass of its own; None: all."""

    def compute_log_probs(self, batch: Batch) -> None:
        """Set ``old`` and ``anchor`` of this rank's trajectories, and ``old`` of its probes.

        With ``reward.kl`` also their advantages, which depend on both. With ``training.old`` update,
        ``use_update_logprobs`` sets ``old`` of the first mini-batch; with engine, ``old`` is ``behaviour``.
        """
        without = batch.minibatches[: self._without_pass]
        micro_batches = self._pack(batch.minibatches[len(without) :])
        probes = self._pack(batch.probes.minibatches if batch.probes else [])
        with self.counted(batch, micro_batches):
            scored = self._policy.logprobs([*micro_batches, *probes]) if micro_batches or probes else []
        self._take_scores(batch, micro_batches, scored[: len(micro_batches)])
        _set_old(probes, scored[len(micro_batches) :])
        if self._old_from == "engine":
            for t in iter_trajectories(batch.minibatches):
                t.old = t.behaviour
        self._set_anchor(batch, micro_batches, without)
        if self._settings.reward.kl is not None:
            self._subtract_kl(batch, self._settings.reward.kl)
        if self._policy.replayed is not None and (compared := probes or micro_batches):
            batch.metrics |= self._compare_routes(compared[:1], scored[-len(probes) :] if probes else scored)

    def use_update_logprobs(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
    ) -> None:
        """Use the log-probs of the forward pass of the first update, without a pass before it.

        With ``training.old`` update, sets ``old`` of the first mini-batch; with engine, the guard on mismatch
        gets them. scores: as ``Policy.logprobs`` returns them.
        """
        if self._old_from == "update":
            self._take_scores(batch, micro_batches, scores)
            for t in iter_trajectories(batch.minibatches[:1]):
                t.anchor = t.anchor if len(t.anchor) else t.old
        else:
            self._add_entropies(batch, micro_batches, scores)
            own = [replace(t, old=logp.numpy()) for t, logp in _logps_of(micro_batches, scores)]
            batch.compared = own if self._mesh.leads else []
        if self._policy.replayed is not None and "routes/own_mismatch_mean" not in batch.metrics:
            batch.metrics |= self._compare_routes(micro_batches[:1], scores)

    @contextmanager
    def counted(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Within the block, count the experts of a forward pass over these; adds the metrics."""
        experts = self._shape.experts
        if experts is None:
            yield
            return
        for micro in micro_batches:
            if micro.packed.routes is not None:
                micro.packed.routes.start_counting()
        with counted_routes(self._policy.chunks) as routes:
            yield
        counts = batch.add("routes", sum_arrays(counts_matrix(routes, self._shape)))
        batch.metrics |= load_metrics(counts, experts.layers)
        if self._policy.replayed is not None:
            changes = batch.add("changes", count_changes(micro_batches, self._mesh))
            batch.metrics |= change_metrics(changes, self._policy.replayed)

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
        for micro, values in zip(micro_batches, scores, strict=True) if self._mesh.reports else ():
            entropies = values[ENTROPY].index_select(0, micro.loss_positions)
            entropy += torch.stack([entropies.double().sum(), micro.mask.sum().double()])
        dist.all_reduce(entropy)
        total = batch.add("entropy", entropy)
        batch.metrics["policy/entropy"] = (total[0] / total[1].clamp(min=1)).item()

    def _set_anchor(self, batch: Batch, micro_batches: list[MicroBatch], without: ReplicaBatch) -> None:
        """Set ``anchor`` of the trajectories that have ``old``, or of all if other weights compute it.

        micro_batches: those of the pass. without: mini-batches that are not among them.
        """
        held = self._anchor is not None or (self._teacher is not None and not self._settings.full_divergence)
        if held:
            micro_batches = [*micro_batches, *self._pack(without)]
            if self._anchor:
                with self._anchor.swapped_in():
                    anchor = self._policy.logprobs([micro.without_routes() for micro in micro_batches])
            else:
                assert self._teacher is not None
                anchor = self._teacher.logprobs(micro_batches)
            for t, logp in _logps_of(micro_batches, anchor):
                t.anchor = logp.numpy()
            return
        for t in iter_trajectories(batch.minibatches):
            if len(t.old) and not len(t.anchor):  # else a teacher's server has given it
                t.anchor = t.old

    def score_probes(self, probes: ProbeBatch) -> list[Floats]:
        """Set ``old`` of this rank's probes alone; returns that of ``probes.mine``."""
        micro_batches = self._pack(probes.minibatches)
        _set_old(micro_batches, self._policy.logprobs(micro_batches))
        return [t.old for t in probes.mine]

    def mean_loss(self, batch: Batch) -> tuple[float, int]:
        """Mean of -log p over the trained tokens of a batch, in nats, and their number."""
        micro_batches = self._pack(batch.minibatches)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro, values in zip(micro_batches, self._policy.logprobs(micro_batches), strict=True):
            if self._mesh.reports:
                logps = values[LOGP].index_select(0, micro.loss_positions)
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
            new = advantages_of(batch.index, self._advantages, penalty)
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
        unreplayed = self._policy.logprobs([micro.without_routes() for micro in micro_batches])
        scored = replayed[: len(micro_batches)]
        both = zip(_logps_of(micro_batches, scored), _logps_of(micro_batches, unreplayed), strict=True)
        for (t, with_replay), (_, own) in both if self._mesh.reports else ():
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

    def _pack(self, minibatches: ReplicaBatch) -> list[MicroBatch]:
        return [self._policy.pack(row) for row in self._rows_to_score(minibatches)] if minibatches else []

    def _rows_to_score(self, minibatches: ReplicaBatch) -> list[list[Trajectory]]:
        """This rank's trajectories packed into rows of the token budget, regardless of mini-batches.

        Every data rank has the same number of rows; some may be empty.
        """
        if len(minibatches) == 1:
            return minibatches[0]
        trajectories = list(iter_trajectories(minibatches))
        budget, context = self._settings.training.tokens_per_microbatch, self._mesh.context
        least = self._settings.training.shared_from
        prompts: list[Prompt] | None = None
        if least is not None:
            prompts = [
                ((t.prompt.tobytes(), routed_by(t)), shareable(len(t.prompt), len(t.response), least))
                for t in trajectories
            ]
        rows = [
            [trajectories[i] for i in row]
            for row in pack_rows([t.length for t in trajectories], budget, context, prompts)
        ]
        return rows + [[] for _ in range(max_over_ranks(len(rows)) - len(rows))]


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
    return torch.split(torch.cat([x[LOGP] for x in outputs]).cpu(), [x.size(1) for x in outputs])

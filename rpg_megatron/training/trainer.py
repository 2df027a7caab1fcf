"""The trainer's part of a step, which needs no engine: shares of a batch, log-probs, updates, the anchor.

Methods are collective unless they say otherwise: every rank calls them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.data.packing import Plan, plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.registry import layout_for
from rpg_megatron.objectives import group_advantages
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.optimizer import learning_rate
from rpg_megatron.policy.policy import Policy, UpdateStats
from rpg_megatron.system.collectives import barrier, gather_objects
from rpg_megatron.training.batch_scatter import BatchScatter, Share
from rpg_megatron.training.checkpoint_saver import load_run
from rpg_megatron.training.loss import build_aggregator, build_loss

_SHOWN = 3  # parameters that a message names


@dataclass
class Batch:
    """A step's trajectories: this rank's share, cut up for the updates; on rank 0 all of them as well."""

    minibatches: Share
    """This rank's; an empty micro-batch keeps the data ranks in step."""
    all: list[Trajectory]
    """Rank 0: every trajectory, in the order of the prompts. Elsewhere empty."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What is known of the step so far; complete on rank 0."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """Rank 0: the sampler's state after these rollouts."""


class Trainer:
    """The policy on this rank, what it is trained with, and the anchor if one is held."""

    def __init__(self, settings: Settings, mesh: Mesh, device: torch.device):
        self.settings, self.mesh, self._device = settings, mesh, device
        self.shape = read_model_shape(settings.model.path)
        self.layout = layout_for(self.shape)
        self.policy = Policy(settings, self.shape, mesh, device, self._load_weights)
        held = settings.anchor.type != "old"
        self.anchor = (
            HeldAnchor([p for _, p in self.policy.named_parameters()], settings.anchor) if held else None
        )
        self._scatter = BatchScatter(mesh)
        self._loss, self._aggregator = build_loss(settings), build_aggregator(settings)
        self.skipped_updates = 0
        """So many updates in a row were skipped, up to the last one."""

    def _load_weights(self, policy: Policy) -> None:
        load_hf_weights(
            self.settings.model.path,
            policy.loadable_parameters(),
            self.layout,
            tensor=self.mesh.tensor,
            tensor_rank=self.mesh.tensor_rank,
            vocab_multiple=self.settings.model.vocab_multiple,
        )
        barrier()  # here, not within the first collective over NCCL, wait those that have read fast

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Take up a checkpoint of a run; returns what else is in it."""
        state = load_run(checkpoint, self.policy, self.anchor)
        self.skipped_updates = state.get("skipped_updates", 0)
        return state

    def share_out(self, everything: list[Trajectory]) -> Batch:
        """Make advantages of the rewards, and give each rank its share. everything: on rank 0."""
        plan: Plan = []
        if self.mesh.rank == 0:
            rewards = torch.tensor([t.reward for t in everything], dtype=torch.float64)
            groups = torch.tensor([t.group for t in everything])
            lengths = torch.tensor([len(t.response) for t in everything])
            advantages = group_advantages(rewards, groups, kind=self.settings.advantage.type, lengths=lengths)
            for t, a in zip(everything, advantages.tolist(), strict=True):
                t.advantage = a
            training = self.settings.training
            plan = plan_batches(
                [t.length for t in everything],
                minibatches=training.minibatches,
                data=self.mesh.data,
                budget=training.tokens_per_microbatch,
                context=self.mesh.context,
                attention_length=self.shape.attention_length,
            )
        return Batch(self._scatter.scatter(plan, everything), everything)

    def compute_log_probs(self, batch: Batch) -> None:
        """Fill in ``old`` and ``anchor`` of every trajectory, on its ranks and on rank 0."""
        packs = [self.policy.pack(micro) for mini in batch.minibatches for micro in mini]
        old = self.policy.logprobs(packs)
        anchor = old
        if self.anchor:
            with self.anchor.swapped_in():
                anchor = self.policy.logprobs(packs)
        entropy = torch.zeros(2, dtype=torch.float64, device=self._device)
        own = _to_host(old)
        held = own if anchor is old else _to_host(anchor)
        for pack, values, logps, anchor_logps in zip(packs, old, own, held, strict=True):
            for (t, logp), (_, anchor_logp) in zip(pack.split(logps), pack.split(anchor_logps), strict=True):
                t.old = logp.numpy().copy()
                t.anchor = anchor_logp.numpy().copy() if self.anchor else t.old
            if self.mesh.reports:
                learnt = values[1].index_select(0, pack.learnt)
                entropy += torch.stack([learnt.double().sum(), pack.mask.sum().double()])
        dist.all_reduce(entropy)
        batch.metrics["policy/entropy"] = (entropy[0] / entropy[1].clamp(min=1)).item()
        self._scatter.gather("old", batch.minibatches)
        if self.anchor:
            self._scatter.gather("anchor", batch.minibatches)
        else:
            for t in batch.all:
                t.anchor = t.old

    def update(self, step: int, batch: Batch, tell: Callable[[int, int], None]) -> None:
        """One optimizer update for each mini-batch; then the anchor is moved if it is due.

        What the updates report goes into the batch's metrics. tell: called with (done, all) before each.
        Raises UserError if too many updates in a row had to be skipped.
        """
        lr = learning_rate(self.settings.optimizer, step)
        updates: list[UpdateStats] = []
        with self.policy.updating():
            for i, minibatch in enumerate(batch.minibatches):
                tell(i, len(batch.minibatches))
                packs = [self.policy.pack(micro) for micro in minibatch]
                updates.append(self.policy.update(packs, self._loss, self._aggregator, lr))
                self._count_skipped(f"step {step}, update {i + 1} of {len(batch.minibatches)}", updates[-1])
        done = [u for u in updates if not u.skipped]
        if self.anchor and done:
            tokens = sum(u.tokens for u in done)
            self.anchor.after_step(len(done), sum(u.means["kl"] * u.tokens for u in done) / max(tokens, 1))
        batch.metrics |= self._summarise(updates) | {"lr": lr}

    def _count_skipped(self, where: str, update: UpdateStats) -> None:
        self.skipped_updates = self.skipped_updates + 1 if update.skipped else 0
        if not update.skipped:
            return
        most = self.settings.guards.skipped_updates
        names = [
            f"{name} on rank {rank}"
            for rank, names in enumerate(gather_objects(self.policy.spoilt_gradients()))
            for name in names
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = ", ".join(names[:_SHOWN]) + more
        message = (
            f"{where}: the gradient is not finite (norm {update.grad_norm}; {listed}); the update is skipped"
        )
        if self.skipped_updates >= most:
            raise UserError(
                f"{message}, like {most - 1} before it in a row (guards.skipped_updates: {most}). Lower "
                "optimizer.lr or objective.beta, and look at rewards and log-probs of the step in rollouts/; "
                "the newest checkpoint has weights that are still good"
            )
        if self.mesh.rank == 0:
            print(f"warning: {message}, {self.skipped_updates} in a row; {most} end the run", flush=True)

    def _summarise(self, updates: Sequence[UpdateStats]) -> dict[str, float]:
        """Metrics of those of a step's updates that were not skipped, if there are any."""
        done = [u for u in updates if not u.skipped]
        row = {"policy/skipped_updates": float(len(updates) - len(done))}
        if not done:
            return row
        tokens = sum(u.tokens for u in done)

        def mean(key: str) -> float:
            return sum(u.means[key] * u.tokens for u in done) / max(tokens, 1)

        row |= {
            "policy/loss": sum(u.loss for u in done) / len(done),
            "policy/loss_abs": mean("abs_loss"),
            "policy/grad_norm": sum(u.grad_norm for u in done) / len(done),
            "policy/grad_norm_first": done[0].grad_norm,
            "policy/clip_frac_high": mean("clip_high"),
            "policy/clip_frac_low": mean("clip_low"),
            "policy/clip_frac_c": mean("clip_c"),
            "policy/log_ratio_clamped": mean("clamped"),
            "kl/anchor": mean("kl"),
            "kl/old": mean("kl_old"),
            "ratio/mean": mean("ratio"),
            "ratio/max": max(u.ratio_max for u in done),
        }
        if self.anchor:
            row["kl/anchor_refreshes"] = float(self.anchor.refreshes)
        if self.settings.correction is not None:
            row |= {
                "correction/ratio_mean": mean("correction_ratio"),
                "correction/hit_frac": mean("correction_hit"),
            }
        return row


def _to_host(scored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The log-probs of what ``Policy.logprobs`` returns, on the CPU; a GPU is waited for once."""
    return torch.split(torch.cat([x[0] for x in scored]).cpu(), [x.size(1) for x in scored])

"""Trainer: the parts of a step that need no engine (batch distribution, updates, anchor, exports).

Methods are collective unless they say otherwise: every rank calls them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.peft import check_adapter
from rpg_megatron.checkpoints.run_folder import ADAPTERS, MODEL, step_folder
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.config.objective import SKIPPED_UPDATES
from rpg_megatron.data.batch_index import BatchIndex, TrajectorySource, index_of
from rpg_megatron.data.packing import Plan, Prompt, count_shared, plan_batches
from rpg_megatron.data.row_layout import shareable
from rpg_megatron.models.lora import AdaptedMapping, AdapterMapping, split_parameters
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.objectives import metric_key, takes_maximum
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy, UpdateStats
from rpg_megatron.policy.schedules import build_schedule
from rpg_megatron.policy.teacher import HeldTeacher
from rpg_megatron.rollout.seeds import chat_ends
from rpg_megatron.system.collectives import barrier, gather_objects
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.advantages import advantages_of, build_advantages
from rpg_megatron.training.batch import Batch, ProbeBatch
from rpg_megatron.training.batch_scatter import BatchScatter
from rpg_megatron.training.batch_scoring import BatchScorer
from rpg_megatron.training.checkpoint_saver import load_run
from rpg_megatron.training.loss import build_aggregator, build_loss
from rpg_megatron.training.off_policy import correction_by_lag, off_policy_metrics

_SHARD_BYTES = 4 * 1024**3
"""Maximum size of a safetensors file of an export."""
_SHOWN = 3  # maximum parameters listed in a message


class TooManySkippedUpdates(UserError):
    """``SKIPPED_UPDATES`` is reached; raised on every rank."""


class Published(NamedTuple):
    """What engines get of the weights."""

    mapping: ModelMapping
    """Of ``policy.served``."""
    adapters: Collection[str] | None
    """The tensors that change, if only adapters do; None: all."""


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
        self.scorer = BatchScorer(self.policy, self.shape, self.anchor, self.teacher, self._advantages)
        """Computes the log-probs of a batch."""
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
    def published(self) -> Published:
        """What engines get of the weights."""
        if self.adapters is None or not self.settings.serves_adapters:
            return Published(self.layout, None)
        return Published(AdaptedMapping(self.layout, self.adapters), self.adapters.hf_tensors().keys())

    def _held_teacher(self) -> HeldTeacher | None:
        """The teacher, if the ranks hold one."""
        if self.settings.teacher is None or self.settings.teacher.path is None:
            return None
        path = self.settings.teacher.path
        shape = read_model_shape(path)
        load = partial(self._load, path, layout=mapping_for(shape))
        return HeldTeacher(self.settings, shape, self.mesh, self._device, load)

    def _load(
        self,
        path: Path,
        parameters: Iterable[tuple[str, torch.Tensor]],
        layout: ModelMapping,
        stored: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        coordinates = self.mesh.coordinates(self.settings.model.vocab_multiple)
        load_hf_weights(path, parameters, layout, coordinates, stored=stored)
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
        self.write_checkpoint(out, settings.dtype)
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

    def write_checkpoint(self, out: Path, dtype: str | None = None) -> None:
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
            max_shard_bytes=_SHARD_BYTES,
            replace=True,  # a run that was killed right after its export exports again when resumed
            ends=partial(chat_ends, self.settings),
        )

    def prepare_batch(self, index: BatchIndex | None, source: TrajectorySource | None) -> Batch:
        """Compute advantages from rewards, and give each replica its part of the step.

        index: on rank 0. source: on leaders, which fetch their trajectories from it. If a leader cannot, all
        ranks raise.
        """
        advantages = np.zeros(0)
        if index is not None:
            advantages = advantages_of(index, self._advantages)
        plan = self._plan(index, self.settings.minibatches)
        minibatches, trajectories = self._scatter.scatter(plan, index, advantages, source)
        prompts = None if index is None else self._prompts(index)
        shared = (0, 0) if prompts is None else count_shared(plan, prompts)
        return Batch(minibatches, trajectories, index, shared=shared)

    def fetch_probes(self, index: BatchIndex | None, source: TrajectorySource | None) -> ProbeBatch:
        """This replica's part of the step's probes; parameters and errors as in ``prepare_batch``.

        index: None on rank 0 means that there are none.
        """
        if self.mesh.rank == 0 and index is None:
            index = index_of(())
        advantages = np.zeros(0 if index is None else len(index))
        return ProbeBatch(*self._scatter.scatter(self._plan(index, 1), index, advantages, source))

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
        columns = (index.group, index.routed_by, index.branch, index.prompt_length, index.response_length)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [((g, by), 0 if branch else shareable(p, r, least)) for g, by, branch, p, r in rows]

    def start_update(self, batch: Batch) -> None:
        """Accumulate the gradients of the first update, whose forward pass gives log-probs.

        No weight changes. With ``training.old`` update, sets ``old`` of the first mini-batch; with pass,
        there is no effect.
        """
        if self._old_from == "pass":
            return
        micro_batches = [self.policy.pack(row) for row in batch.minibatches[0]]
        with self.scorer.counted(batch, micro_batches):
            batch.started = self.policy.accumulate(
                micro_batches,
                self._loss,
                self._aggregator,
                scored=True,
                sets_old=self._old_from == "update",
            )
        self.scorer.use_update_logprobs(batch, micro_batches, batch.started.scores)

    def update(self, step: int, batch: Batch, on_update: Callable[[int, int], None]) -> None:
        """One update for each mini-batch, ``training.ppo_epochs`` times, then a refresh of the anchor if due.

        Adds the updates' metrics to the batch's. on_update: called with (done, total) before each update.
        Raises TooManySkippedUpdates after ``SKIPPED_UPDATES`` consecutive skipped updates.
        """
        if batch.started is None:
            self.start_update(batch)
        lr = self._learning_rate(step)
        updates: list[UpdateStats] = []
        taught = self._with_teacher(batch)
        with self.policy.updating():
            passes = batch.minibatches * self.settings.training.ppo_epochs
            for i, minibatch in enumerate(passes):
                on_update(i, len(passes))
                if i == 0 and batch.started is not None:
                    done = self.policy.step(batch.started, lr)
                else:
                    packed = taught[i % len(taught)] if taught else [self.policy.pack(m) for m in minibatch]
                    done = self.policy.update(packed, self._loss, self._aggregator, lr)
                updates.append(done)
                self._count_skipped(f"step {step}, update {i + 1} of {len(passes)}", updates[-1])
        applied = [u for u in updates if not u.skipped]
        if self.anchor and applied:
            self.anchor.after_step(len(applied), _mean_kl(applied, self.settings))
        batch.metrics |= self._summarise(updates) | {"lr": lr}
        if self.settings.sft is None:
            batch.metrics |= off_policy_metrics(batch.mine, self.settings)
        if self.settings.rollout.ahead and self.settings.correction is not None:
            batch.metrics |= correction_by_lag(batch.mine, step - 1, self.settings)

    def _with_teacher(self, batch: Batch) -> list[list[MicroBatch]]:
        """Each mini-batch with what its exact divergence to a held teacher needs; empty if it needs nothing.

        Of all mini-batches at once: on a GPU the teacher's weights are copied in for it.
        """
        divergence = self.settings.full_divergence
        if self.teacher is None or divergence is None:
            return []
        packed = [self.policy.pack(micro) for micro in chain.from_iterable(batch.minibatches)]
        rows = iter(self.teacher.with_rows(packed, divergence))
        return [list(islice(rows, len(minibatch))) for minibatch in batch.minibatches]

    def _count_skipped(self, where: str, update: UpdateStats) -> None:
        self.skipped_updates = self.skipped_updates + 1 if update.skipped else 0
        if not update.skipped:
            return
        limit = SKIPPED_UPDATES
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
                f"{message}, like {limit - 1} before it in a row. Lower "
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

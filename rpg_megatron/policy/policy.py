"""The policy on one rank: log-probs and optimizer updates of packed micro-batches, by Megatron-Core.

Methods are collective unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.checkpoints.megatron import PlannedSave, load_weights, plan_save
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.models.lora import split_parameters
from rpg_megatron.objectives import LossOutput, ResponseTokens, takes_maximum
from rpg_megatron.objectives.ratios import finite_at_end
from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.fp8_emulation import emulate_fp8
from rpg_megatron.policy.logprobs import DIVERGENCE, ENTROPY, LOGP
from rpg_megatron.policy.lora import LoraModel, MergedWeights
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import Mesh, build_model, transformer_config
from rpg_megatron.policy.offload import StateOffloader
from rpg_megatron.policy.optimizer import (
    build_optimizer,
    gather_weights,
    use_training_point,
    wrap_data_parallel,
)
from rpg_megatron.policy.precision import (
    ExportedWeights,
    loadable,
    quantise,
    uses_transformer_engine,
)
from rpg_megatron.policy.router_aux_loss import RouterAuxLoss
from rpg_megatron.policy.router_replay import install_replay
from rpg_megatron.policy.scoring import ScoringModel, whole_row
from rpg_megatron.system.collectives import gather_objects

TokenLoss = Callable[[Tensor, ResponseTokens], LossOutput]
"""(log-probs [n], other inputs of these n response tokens) -> loss of each token."""
Aggregator = Callable[[Tensor, ResponseTokens], tuple[Tensor, Tensor]]
"""(loss of each token [n], other inputs of these tokens) -> (sum, count), which are summed over micro-batches
and ranks.
"""


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one optimizer update over all ranks."""

    tokens: int
    loss: float
    """Mean loss by the configured aggregation, without ``aux_loss``."""
    abs_loss: float
    """Mean of |loss| over response tokens."""
    metrics: dict[str, float]
    """The loss's metrics over response tokens: the maximum if ``takes_maximum(name)``, else the mean."""
    grad_norm: float
    """Before clipping."""
    skipped: bool
    """The gradient was not finite, so the update was skipped."""
    aux_loss: float | None = None
    """``RouterAuxLoss``: mean over tokens and layers, without its coefficient. None: not used."""


@dataclass(frozen=True)
class Accumulated:
    """An update whose gradients are accumulated; the weights have not changed yet."""

    reports: list[dict[str, Any]]
    """Of each micro-batch, on the last stage."""
    scores: list[Tensor]
    """As ``ScoringModel.logprobs`` returns them; empty unless they were requested."""


class Policy(ScoringModel):
    """The trained model on this rank: its part of the weights, gradients and optimizer state."""

    def __init__(
        self,
        settings: Settings,
        shape: ModelShape,
        mesh: Mesh,
        device: torch.device,
        load: Callable[[Policy], None],
    ) -> None:
        """Build the model, call ``load(self)`` to load its weights, create gradient buffers and optimizer.

        The order matters: the optimizer copies the weights into its float32 main weights when it is created.
        ``load`` writes into ``loadable_parameters``.
        Raises UserError if settings require layers or a precision that this machine does not support.
        """
        recompute = settings.recompute
        fused = uses_transformer_engine(settings, device)
        self.replayed = shape.experts if settings.training.router_replay == "rollout" else None
        config = transformer_config(
            *(shape, settings.parallel, settings.precision, recompute),
            device=device,
            fused=fused,
            replays=self.replayed is not None,
        )
        built = build_model(
            shape,
            config,
            settings.model,
            mesh,
            separate_norms=settings.lora is not None,
            share_prompts=bool(settings.training.share_prompts),
        )
        chunks = [chunk.to(device) for chunk in built]
        super().__init__(settings, mesh, device, chunks, shape.vocab_size)
        if settings.precision.fp8 is not None and device.type == "cpu":
            emulate_fp8(self.chunks, settings.precision.fp8)
        self.adapters = (
            None if settings.lora is None else LoraModel(self.chunks, shape, settings.lora, settings.seed)
        )
        if self.replayed is not None:
            install_replay(self.chunks, self.replayed)
        coefficient = settings.training.router_aux_loss
        self._aux_loss = (
            RouterAuxLoss(coefficient, self.chunks, shape.experts, device)
            if coefficient and shape.experts is not None
            else None
        )
        load(self)
        quantise(self.named_parameters())
        self._trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        self._models = wrap_data_parallel(
            self.chunks, settings.optimizer, settings.precision, mesh.data * mesh.context
        )
        self._optimizer = build_optimizer(
            self._models, settings.optimizer, settings.precision, settings.memory
        )
        gather_weights(self._models)  # otherwise the first forward pass would gather them
        self._head = replace(self._head, entropy_gradient=settings.objective.entropy_bonus > 0)
        use_training_point(self._optimizer, False)
        self.offloader = StateOffloader(self._models, self._optimizer)
        self.served = self._served()
        self._metrics: list[str] = []  # names of the loss's metrics, the same on all ranks

    def loadable_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The same names, each with the tensor to load its values into."""
        return loadable(self.named_parameters())

    def trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those that updates change: all of them, or those of adapters."""
        return self._trained

    def _served(self) -> ExportedWeights:
        if self.adapters is None or self.settings.serves_adapters:
            return ExportedWeights(self.named_parameters())
        model, _ = split_parameters(dict(self.named_parameters()))
        return ExportedWeights(model.items(), self.adapters)

    def complete_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """This rank's weights for an export, by name; those with adapters are merged when they are read.

        dtype: of the sums.
        """
        if self.adapters is None or self.served.merges:
            return self.served.tensors
        model, _ = split_parameters(self.served.tensors)
        return MergedWeights(model, self.adapters, dtype)

    def plan_save(self, folder: Path, step: int, *, stage: bool) -> PlannedSave:
        """Plan a save of weights and optimizer state; ``folder`` is empty. Not inside ``updating``.

        stage: weights and state may change once this returns; see ``checkpoints.megatron.plan_save``.
        """
        return plan_save(folder, self.chunks, self._optimizer, step, stage=stage)

    def load(self, folder: Path, *, trusted: bool = False) -> None:
        """Load weights and optimizer state from a checkpoint of any parallel layout.

        trusted: see ``load_weights``.
        """
        load_weights(folder, self.chunks, self.vocab, self._optimizer, trusted=trusted)

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: TokenLoss, aggregator: Aggregator, lr: float
    ) -> UpdateStats:
        """One optimizer update on a mini-batch: this rank's micro-batches, the same number on each data rank.

        The loss is the mean over the mini-batches of all ranks, by ``aggregator``, plus the loss of
        ``RouterAuxLoss`` if it is used. If the gradient is not finite on any rank, the update is skipped on
        all ranks.
        """
        return self.step(self.accumulate(micro_batches, loss, aggregator), lr)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: TokenLoss,
        aggregator: Aggregator,
        *,
        scored: bool = False,
        sets_old: bool = False,
    ) -> Accumulated:
        """The first part of ``update``: the gradients.

        scored: also return log-probs and entropies. sets_old: these log-probs are ``old`` in the loss, so
        that w = 1 exactly. Raises ValueError at the end if a log-prob was not finite.
        """
        for model in self._models:
            model.train()
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._aux_loss is not None:
            self._aux_loss.start_update(micro_batches, aggregator)

        def step(iterator: object, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], object]]:
            micro_batch = next(iterator)  # type: ignore[call-overload]
            output = self.forward(micro_batch, model)
            return output, lambda output: sum_loss(output, micro_batch)

        def sum_loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total, count, report = self._sum_loss(output, micro_batch, loss, aggregator, sets_old)
            return (
                total,
                count,
                report | ({"scores": whole_row(output[:DIVERGENCE], micro_batch)} if scored else {}),
            )

        with finite_at_end():
            reports = self.run(step, micro_batches, forward_only=False)
        if not scored:
            return Accumulated(reports, [])
        scores = [report.pop("scores") for report in reports]
        return Accumulated(reports, self._on_all_stages(micro_batches, scores))

    def step(self, accumulated: Accumulated, lr: float) -> UpdateStats:
        """The second part of ``update``: the optimizer's step, with the last accumulated gradients."""
        reports = accumulated.reports
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        # The gradient norm excludes duplicates on tensor-parallel ranks, so each rank checks all of its
        # gradients.
        sums = torch.stack([_gradient(p).sum() for _, p in self._trained])
        finite = torch.isfinite(sums).all().view(1)
        nonfinite = torch.ones_like(sums[:1]) if not math.isfinite(grad_norm) else (~finite).to(sums.dtype)
        # Ranks without the loss, such as early pipeline stages, learn the names of metrics from the others.
        names = {name for report in reports for name in report["metrics"]}
        unknown = torch.full_like(nonfinite, float(not names.issubset(self._metrics)))
        flags = torch.cat([nonfinite, unknown])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        skipped, renamed = flags.bool().tolist()
        if renamed:
            self._metrics = sorted(set(self._metrics).union(*gather_objects(names, set[str])))
        if not skipped:
            self._optimizer.step()
        return self._reduce(reports, grad_norm, skipped=skipped)

    def nonfinite_gradients(self) -> list[str]:
        """This rank's parameters whose gradient was not finite in the last update. Not collective."""
        return [name for name, p in self._trained if not torch.isfinite(_gradient(p)).all()]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context for ``update``: sets the weights to the point at which gradients are taken.

        Schedule-Free optimizers take gradients at one point and evaluate at another; other optimizers have a
        single point. Inside the block, weights that other ranks own may be stale on this rank until the next
        update gathers them. After the block all weights are current, so log-probs, publishing and saving are
        possible. Collective, unless the block raises.
        """
        use_training_point(self._optimizer, True)
        try:
            yield
            gather_weights(self._models)
        finally:
            use_training_point(self._optimizer, False)

    def _sum_loss(
        self,
        output: Tensor,
        micro_batch: MicroBatch,
        loss: TokenLoss,
        aggregator: Aggregator,
        sets_old: bool,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The loss function for Megatron, which divides by the global count: (sum, count, report).

        All context ranks compute the loss of full sequences, and each propagates the gradient of its
        positions. Megatron sums gradients and counts over them, so only the first one reports a count.
        """
        tokens = micro_batch.response_tokens()

        def at_responses(row: int) -> Tensor:
            whole = gather_places(output[row], micro_batch.packed.places, summed=False)
            return whole.index_select(0, micro_batch.loss_positions)

        if self._head.entropy_gradient:
            tokens = replace(tokens, entropy=at_responses(ENTROPY))
        if micro_batch.teacher is not None:
            tokens = replace(tokens, divergence=at_responses(DIVERGENCE))
        logps = at_responses(LOGP)
        if sets_old:
            tokens = replace(tokens, old=logps.detach())
        out = loss(logps, tokens)
        total, count = aggregator(out.per_token, tokens)
        report = _report(out, total, count)
        # int: Megatron sums the counts in an integer tensor.
        return total, count.int() * (self.mesh.context_rank == 0), report

    def _reduce(self, reports: list[dict[str, Any]], grad_norm: float, *, skipped: bool) -> UpdateStats:
        """Combine the micro-batches' reports over all ranks; one rank of each replica contributes."""
        maxima = [name for name in self._metrics if takes_maximum(name)]
        means = [name for name in self._metrics if not takes_maximum(name)]
        sums = torch.zeros(4 + len(means), dtype=torch.float64, device=self.device)
        largest = torch.full((len(maxima),), -math.inf, dtype=torch.float64, device=self.device)
        absent = sums.new_zeros(())
        for report in reports if self.mesh.reports else []:
            reported = report["metrics"]
            sums += torch.cat([report["sums"], *[reported.get(name, absent).view(1) for name in means]])
            for i, name in enumerate(maxima):
                if name in reported:
                    largest[i] = torch.maximum(largest[i], reported[name])
        if self._aux_loss is not None:  # every rank contributes
            sums = torch.cat([self._aux_loss.value().view(1), sums])
        dist.all_reduce(sums)
        if maxima:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        values = torch.cat([sums, largest]).tolist()
        aux_loss = None if self._aux_loss is None else values.pop(0)
        (loss, count, tokens, abs_loss), values = values[:4], values[4:]
        metrics = {name: value / max(tokens, 1) for name, value in zip(means, values, strict=False)}
        # Without a token there is no maximum.
        metrics |= {
            name: 0.0 if value == -math.inf else value
            for name, value in zip(maxima, values[len(means) :], strict=True)
        }
        return UpdateStats(
            tokens=int(tokens),
            loss=loss / max(count, 1),
            abs_loss=abs_loss / max(tokens, 1),
            metrics=metrics,
            grad_norm=grad_norm,
            skipped=skipped,
            aux_loss=aux_loss,
        )


def _gradient(p: Any) -> Tensor:
    """The accumulated gradient, which Megatron's DDP keeps as an attribute of the parameter."""
    gradient: Tensor = p.main_grad
    return gradient


def _report(out: LossOutput, total: Tensor, count: Tensor) -> dict[str, Any]:
    """Report of a micro-batch: ``sums`` (loss, count, tokens, |loss|), sum or maximum of metrics. float64."""
    tokens = torch.full_like(total, out.per_token.numel(), dtype=torch.float64)
    absolute = out.per_token.detach().abs().double().sum()
    sums = torch.stack([total.detach().double(), count.double(), tokens, absolute])
    metrics = {}
    for name, values in out.metrics.items():
        each = values.detach().double()
        if takes_maximum(name):
            metrics[name] = each.max() if each.numel() else each.new_full((), -math.inf)
        else:
            metrics[name] = each.sum()
    return {"sums": sums, "metrics": metrics}

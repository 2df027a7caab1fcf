"""The policy: packed log-probs and updates on one rank of the parallel layout. Every method is collective."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.objectives import LossOutput, unnormalised_kl
from rpg_megatron.policy.logprobs import logprob_head
from rpg_megatron.policy.model import Mesh, build_model, transformer_config
from rpg_megatron.policy.optimizer import build_optimizer, use_training_point, wrap_data_parallel
from rpg_megatron.policy.packed import Pack, ResponseTokens, make_pack

TokenLoss = Callable[[Tensor, ResponseTokens], LossOutput]
"""(logp [n], the rest of what is known of these n response tokens) -> loss of each."""
Aggregator = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(loss of each token [n], sequences [n]) -> (sum, count) that add up over micro-batches and ranks."""

_LOCAL_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")

_MEANS = (
    "abs_loss",
    "ratio",
    "kl",
    "kl_old",
    "clip_high",
    "clip_low",
    "clip_c",
    "clamped",
    "correction_ratio",
    "correction_hit",
)
"""What is reported of each update as a mean over its response tokens."""


@dataclass(frozen=True)
class _Head:
    """What the log-prob head needs to know."""

    temperature: float
    chunk: int
    vocab: int


@dataclass(frozen=True)
class Update:
    """One optimizer update, over all ranks: means over its response tokens, and the norm before clipping."""

    tokens: int
    loss: float
    """As aggregated."""
    means: dict[str, float]
    """See _MEANS; those of a correction are 0 if there is none."""
    ratio_max: float
    grad_norm: float


class Policy:
    """The trained model on this rank: its part of the weights, gradients and optimizer state."""

    def __init__(
        self,
        settings: Settings,
        shape: ModelShape,
        mesh: Mesh,
        device: torch.device,
        load: Callable[[Policy], None],
    ) -> None:
        """Build the model, fill it by ``load(self)``, then set up gradients and optimizer.

        The order matters: the optimizer copies the weights into its float32 master copies when it is made.
        """
        self.mesh, self.device, self.settings = mesh, device, settings
        config = transformer_config(shape, settings.parallel, settings.precision)
        self._module = build_model(shape, config, settings.model, mesh).to(device)
        load(self)
        self._model = wrap_data_parallel(self._module, settings.optimizer)
        self._optimizer = build_optimizer(self._model, settings.optimizer, settings.precision)
        self._head = _Head(settings.rollout.temperature, settings.training.logprob_chunk, shape.vocab_size)
        use_training_point(self._optimizer, False)
        self._align = mesh.tensor if settings.parallel.sequence else 1

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under Megatron's names, layers numbered through the whole model."""
        first = self._module.decoder.layers[0].layer_number - 1 if len(self._module.decoder.layers) else 0
        for name, parameter in self._module.named_parameters():
            yield _LOCAL_LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + first}", name), parameter

    def pack(self, trajectories: Sequence[Trajectory]) -> Pack:
        """A micro-batch on this rank's device."""
        return make_pack(trajectories, self.device, align=self._align)

    def logprobs(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Log-probs and entropies at every place of every pack: [2, t] each, float32, nats.

        Without gradient. All ranks of a data-parallel replica get them.
        """
        self._model.eval()
        with torch.no_grad():
            outputs = get_forward_backward_func()(
                forward_step_func=self._scored,
                data_iterator=iter(packs),
                model=[self._model],
                num_microbatches=len(packs),
                seq_length=1,  # with the next, ignored: lengths vary
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        flat = torch.empty(2, sum(p.size for p in packs), dtype=torch.float32, device=self.device)
        if self.mesh.last_stage:
            torch.cat(outputs, dim=1, out=flat)
        if self.mesh.pipeline > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(flat, src=last, group=mpu.get_pipeline_model_parallel_group())
        return list(flat.split([p.size for p in packs], dim=1))

    def update(self, packs: Sequence[Pack], loss: TokenLoss, aggregator: Aggregator, lr: float) -> Update:
        """One optimizer update on a mini-batch: this rank's packs, as many as every other data rank has.

        The loss is the mean, as ``aggregator`` counts, over the whole mini-batch, wherever it lies.
        A norm that is not finite means that the weights are spoilt: the caller must look at it.
        """
        self._model.train()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

        def step(iterator: object, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], object]]:
            pack = next(iterator)  # type: ignore[call-overload]
            return self._forward(pack, model), lambda output: _sum_loss(output, pack, loss, aggregator)

        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=[self._model],
            num_microbatches=len(packs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self._optimizer.step()
        return self._reduce(reports, float(grad_norm))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Put the weights where ``update`` wants them; needed around updates, and around nothing else.

        Schedule-Free optimizers take gradients at one point and evaluate at another; others have just one.
        """
        use_training_point(self._optimizer, True)
        try:
            yield
        finally:
            use_training_point(self._optimizer, False)

    def _forward(self, pack: Pack, model: torch.nn.Module) -> Tensor:
        return model(
            pack.tokens,
            pack.positions,
            None,
            labels=pack.labels,
            packed_seq_params=pack.packed,
            output_processor=logprob_head,
            output_processor_context=self._head,
        )

    def _scored(self, iterator: object, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
        pack = next(iterator)  # type: ignore[call-overload]
        return self._forward(pack, model), lambda output, non_loss_data: output.detach().clone()

    def _reduce(self, reports: list[dict[str, Tensor]], grad_norm: float) -> Update:
        """Sum the micro-batches' reports over all ranks; one rank of each replica contributes."""
        sums = torch.zeros(len(_MEANS) + 3, dtype=torch.float64, device=self.device)
        largest = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self.mesh.reports:
            for report in reports:
                sums += report["sums"]
                largest = torch.maximum(largest, report["largest"])
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, count, tokens, *values = sums.tolist()
        means = {name: value / max(tokens, 1) for name, value in zip(_MEANS, values, strict=True)}
        return Update(int(tokens), loss / max(count, 1), means, float(largest), grad_norm)


def _sum_loss(
    output: Tensor, pack: Pack, loss: TokenLoss, aggregator: Aggregator
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's contract where it divides by a global count: (sum, count, report)."""
    tokens = pack.response_tokens()
    out = loss(output[0][pack.mask], tokens)
    total, count = aggregator(out.per_token, tokens.sequences)
    w = out.metrics["ratio"]
    # Whatever the anchor is, how far the update has moved from the policy that the step began with.
    kl_old = unnormalised_kl(w, w.log(), torch.ones_like(w))
    columns = {"abs_loss": out.per_token.detach().abs(), "kl_old": kl_old, **out.metrics}
    absent = total.new_zeros((), dtype=torch.float64)
    means = [columns[name].double().sum() if name in columns else absent for name in _MEANS]
    sums = torch.stack([total.detach().double(), count.double(), pack.mask.sum().double(), *means])
    ratio = columns["ratio"].double()
    largest = ratio.max().view(1) if ratio.numel() else ratio.new_zeros(1)
    # int: Megatron adds the counts up in an integer tensor.
    return total, count.int(), {"sums": sums, "largest": largest}

"""A model that scores packed micro-batches by Megatron's pipeline schedule: the policy, or a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.logprobs import Head, token_logprobs
from rpg_megatron.policy.lora import gather_tokens, head_parts
from rpg_megatron.policy.microbatch import MicroBatch, make_micro_batch
from rpg_megatron.policy.model import Mesh, named_parameters
from rpg_megatron.policy.router_aux_loss import RouterAuxLoss


def logprob_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Head,
    config: Any,
    **_: Any,
) -> Tensor:
    """The ``output_processor`` of GPTModel.forward, in place of its output layer.

    ``labels`` [1, t]. Returns the rows of ``token_logprobs``, [2 or 3, t], float32; entropies without a
    gradient unless entropy_gradient is set.
    """
    hidden, weight = gather_hidden(hidden_states, output_layer, output_weight, config)
    logp, entropy, *divergence = token_logprobs(
        hidden,
        weight,
        labels.view(-1),
        context,
        group=output_layer.tp_group,
        added=head_parts(output_layer, hidden_states),
    )
    return torch.stack([logp, entropy if context.entropy_gradient else entropy.detach(), *divergence])


def gather_hidden(
    hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any
) -> tuple[Tensor, Tensor]:
    """Hidden states [t, hidden] of all tensor-parallel ranks, and this rank's rows of the output layer."""
    # The output layer is not called, so run its forward pre-hooks here: they wait for the weight where it is
    # still being gathered.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    hidden = gather_tokens(hidden_states, config, output_layer.tp_group)
    return hidden.squeeze(1), output_layer.weight if output_weight is None else output_weight


class ScoringModel:
    """This rank's part of a model. Methods are collective unless they say otherwise."""

    replayed: ExpertShape | None = None
    """The experts, if the engine's choice of them is replayed; None: the routers choose."""
    _aux_loss: RouterAuxLoss | None = None

    def __init__(
        self, settings: Settings, mesh: Mesh, device: torch.device, chunks: list[GPTModel], vocab: int
    ):
        self.mesh, self.device, self.settings = mesh, device, settings
        self.chunks = chunks
        """This rank's GPTModels: one for each virtual stage."""
        self._models: list[Any] = list(chunks)
        self.vocab = vocab
        self._head = Head(settings.temperature, settings.training.logprob_chunk, vocab)
        self._align = settings.precision.token_multiple(settings.parallel)

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under Megatron's names, layers numbered through the whole model."""
        return named_parameters(self.chunks)

    def pack(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """A micro-batch on this rank's device."""
        return make_micro_batch(
            trajectories,
            self.device,
            align=self._align,
            context=self.mesh.context,
            context_rank=self.mesh.context_rank,
            mask_truncated=self.settings.training.mask_truncated,
            experts=self.replayed,
            direction=self.settings.top_divergence,
            share=self.settings.training.shared_from,
        )

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs and entropies at every position of each micro-batch: [2, t] each, float32, nats.

        Without gradient. All ranks of a data-parallel replica get them.
        """
        for model in self._models:
            model.eval()
        with torch.no_grad():
            plain = [replace(micro, teacher=None) for micro in micro_batches]
            outputs = self.run(self._scored, plain, forward_only=True)
        return self._on_all_stages(micro_batches, outputs)

    def _on_all_stages(self, micro_batches: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs [2, t] of the micro-batches, on all stages. outputs: on the last one, with padding."""
        flat = torch.empty(2, sum(p.size for p in micro_batches), dtype=torch.float32, device=self.device)
        if self.mesh.last_stage:
            torch.cat(list(outputs[: len(micro_batches)]), dim=1, out=flat)
        if self.mesh.pipeline > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(flat, src=last, group=mpu.get_pipeline_model_parallel_group())
        return list(flat.split([p.size for p in micro_batches], dim=1))

    def run(
        self, step: Callable[..., object], micro_batches: Sequence[MicroBatch], *, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; returns the results of ``step``, on the last stage.

        The interleaved schedule needs a multiple of the pipeline size: empty micro-batches are appended, the
        same number on every data rank; their results come last.
        """
        if len(self._models) > 1:
            micro_batches = [*micro_batches, *[self.pack([])] * (-len(micro_batches) % self.mesh.pipeline)]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in self._models],
            model=self._models,
            num_microbatches=len(micro_batches),
            seq_length=1,  # with the next, ignored: lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def forward(
        self, micro_batch: MicroBatch, model: torch.nn.Module, head: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """The model's output for a micro-batch. head: in place of ``logprob_head``."""
        output: Tensor = model(
            micro_batch.tokens,
            micro_batch.positions,
            None,
            labels=micro_batch.labels,
            packed_seq_params=micro_batch.packed,
            padding_mask=None if self._aux_loss is None else micro_batch.padding,
            output_processor=head or logprob_head,
            output_processor_context=replace(
                self._head, label_range=micro_batch.label_range, teacher=micro_batch.teacher
            ),
        )
        return output

    def _scored(self, iterator: object, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
        micro_batch = next(iterator)  # type: ignore[call-overload]

        return self.forward(micro_batch, model), lambda output, non_loss_data: whole_row(output, micro_batch)


def whole_row(output: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The outputs of a micro-batch on all context ranks together: [2, t], without gradient."""
    return gather_places(output.detach().t(), micro_batch.packed.places, summed=False).t().clone()

"""Raw logits of complete sequences, to compare two implementations of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rpg_megatron.policy.microbatch import pack_lengths


@torch.no_grad()
def raw_logits(model: GPTModel, sequences: Sequence[Sequence[int]], vocab: int) -> list[Tensor]:
    """Logits after every token of every sequence, without vocabulary padding: [n, vocab] each.

    Collective; the list is empty on ranks before the last stage. ``vocab`` is the vocabulary size without
    padding. For checks on a few sequences: holds all logits at once. Each sequence is one micro-batch.
    """
    config = model.config
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def step(iterator: Any, module: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
        sequence = list(next(iterator))
        length = len(sequence)
        sequence += [0] * (-length % multiple)  # padding at the end: no token attends to it
        tokens = torch.tensor([sequence], device=next(module.parameters()).device)
        output = module(
            tokens,
            torch.arange(tokens.size(1), device=tokens.device)[None],
            None,
            labels=tokens,
            packed_seq_params=pack_lengths([tokens.size(1)], tokens.device),
            output_processor=_logits_head,
            output_processor_context=vocab,
        )
        return output, lambda logits, non_loss_data: logits[:length]

    model.eval()
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(sequences),
        model=[model],
        num_microbatches=len(sequences),
        seq_length=1,  # with the next, ignored: lengths vary
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return list(outputs)


def _logits_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: int,
    config: Any,
    **_: Any,
) -> Tensor:
    """Replaces the output layer of GPTModel.forward: the whole vocabulary, on every tensor rank."""
    weight = output_layer.weight if output_weight is None else output_weight
    if config.sequence_parallel:
        hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, group=output_layer.tp_group
        )
    local = torch.matmul(hidden_states.squeeze(1), weight.t())
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(local, group=output_layer.tp_group)
    logits: Tensor = whole[:, :context].clone()
    return logits

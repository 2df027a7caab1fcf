"""The batch of a step: prompts, mini-batches, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rpg_megatron.config import Settings
from rpg_megatron.data.packing import padded_length, sequence_multiple


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of a step. Tokens are upper bounds: all responses have the maximum length."""

    prompts: int
    sequences: int
    """Responses per step."""
    updates: int
    """Optimizer updates per step: mini-batches x epochs."""
    sequences_per_update: int
    sequences_per_rank: int
    """Responses of one mini-batch on the data-parallel replica with the most."""
    longest: int
    """Tokens of the longest prompt and response together."""
    context: int
    """The same, including evaluation: the context length of the engines."""
    tokens_per_microbatch: int
    """Tokens of a replica's largest micro-batch: the budget, or one longest sequence that is larger."""
    lengths: tuple[int, ...]
    """Tokens of its sequences, at maximum length."""
    microbatches: int
    """Micro-batches per update and replica, with all sequences at maximum length."""
    pipeline_idle: float
    """Idle share of a pipeline rank in an update, with micro-batches of equal size."""


def plan_batch(settings: Settings, max_positions: int) -> BatchPlan:
    """The batch of these settings. max_positions: that of the model."""
    rollout, training, parallel = settings.rollout, settings.training, settings.parallel
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    update = sequences // training.minibatches
    per_rank = -(-update // parallel.data)
    longest = min(settings.data.max_prompt_tokens + rollout.max_response_tokens, max_positions)
    filled = padded_length(longest, parallel.context)
    in_one = max(1, training.tokens_per_microbatch // filled)
    tokens = max(min(training.tokens_per_microbatch, per_rank * filled), filled)
    each = settings.precision.token_multiple(parallel)
    align = math.lcm(each * parallel.context, sequence_multiple(parallel.context))
    packs = -(-update // in_one)
    microbatches = -(-packs // parallel.data)
    # Interleaving splits each rank's work into ``virtual`` chunks, and shortens the bubble accordingly.
    waits = (parallel.pipeline - 1) / parallel.virtual
    return BatchPlan(
        prompts=rollout.prompts_per_step,
        sequences=sequences,
        updates=training.minibatches * training.epochs,
        sequences_per_update=update,
        sequences_per_rank=per_rank,
        longest=longest,
        context=min(max(part.tokens for part in settings.prompt_sets), max_positions),
        tokens_per_microbatch=-(-tokens // align) * align,
        lengths=_fill(-(-tokens // align) * align, filled),
        microbatches=microbatches,
        pipeline_idle=waits / (microbatches + waits),
    )


def _fill(tokens: int, longest: int) -> tuple[int, ...]:
    """Sequences of maximum length with this total of tokens; the rest is one more."""
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + ((rest,) if rest else ())

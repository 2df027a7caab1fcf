"""From prompts to micro-batches: what a step is cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rpg_megatron.config import Settings
from rpg_megatron.data.packing import fill_length, sequence_multiple


@dataclass(frozen=True)
class BatchPlan:
    """A step's numbers. Tokens are upper bounds: every response as long as it may be."""

    prompts: int
    sequences: int
    """Responses of a step."""
    minibatches: int
    """Optimizer updates in a step."""
    sequences_per_update: int
    sequences_per_rank: int
    """Of one mini-batch, on the data-parallel replica with the most."""
    longest: int
    """Tokens of the longest prompt and response together."""
    context: int
    """The same, evaluation included: what an engine has to hold."""
    tokens_per_microbatch: int
    """Tokens of a replica's largest micro-batch: the budget, or one longest sequence that is larger."""
    lengths: tuple[int, ...]
    """Of its sequences, if they are as long as they may be."""
    microbatches: int
    """Of one update on one replica, if all sequences are as long as they may be."""
    pipeline_idle: float
    """Share of an update that a pipeline rank waits, with so many micro-batches of equal size."""


def plan_batch(settings: Settings, max_positions: int) -> BatchPlan:
    """Cut a step of these settings. max_positions: the model's."""
    rollout, training, parallel = settings.rollout, settings.training, settings.parallel
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    update = sequences // training.minibatches
    per_rank = -(-update // parallel.data)
    longest = min(settings.data.max_prompt_tokens + rollout.max_response_tokens, max_positions)
    evaluated = settings.evaluation.heldout if settings.evaluation else ()
    prompt = max(d.max_prompt_tokens for d in (settings.data, *(part.data for part in evaluated)))
    filled = fill_length(longest, parallel.context)
    in_one = max(1, training.tokens_per_microbatch // filled)
    tokens = max(min(training.tokens_per_microbatch, per_rank * filled), filled)
    # As ``policy.precision.token_multiple`` fills up each context rank's part of a row.
    fp8 = settings.precision.fp8
    each = (parallel.tensor if parallel.sequence else 1) * (fp8.multiple if fp8 is not None else 1)
    align = math.lcm(each * parallel.context, sequence_multiple(parallel.context))
    packs = -(-update // in_one)
    microbatches = -(-packs // parallel.data)
    # Interleaved, every rank's work comes in as many pieces, and the wait at the ends is as much shorter.
    waits = (parallel.pipeline - 1) / parallel.virtual
    return BatchPlan(
        prompts=rollout.prompts_per_step,
        sequences=sequences,
        minibatches=training.minibatches,
        sequences_per_update=update,
        sequences_per_rank=per_rank,
        longest=longest,
        context=min(prompt + rollout.max_response_tokens, max_positions),
        tokens_per_microbatch=-(-tokens // align) * align,
        lengths=_fill(-(-tokens // align) * align, filled),
        microbatches=microbatches,
        pipeline_idle=waits / (microbatches + waits),
    )


def _fill(tokens: int, longest: int) -> tuple[int, ...]:
    """So many tokens as sequences of the greatest length, and what is left as one more."""
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + ((rest,) if rest else ())

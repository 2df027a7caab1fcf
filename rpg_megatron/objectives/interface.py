"""Interface of a loss: its inputs besides the log-probs, and its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ResponseTokens:
    """Inputs of a loss besides the log-probs, for the n response tokens of a micro-batch: [n] each."""

    old: Tensor
    """float32, nats: the trainer's log-prob before the update."""
    anchor: Tensor
    """float32, nats: the log-prob under the KL anchor (reference model)."""
    behaviour: Tensor
    """float32, nats: the engine's log-prob when it sampled the token."""
    advantages: Tensor
    """float32."""
    sequences: Tensor
    """int64: index of the token's response in the micro-batch."""
    sequence_count: int | None = None
    """Number of responses; ``sequences`` are smaller. None: unknown, ``sequences`` may be any labels."""
    entropy: Tensor | None = None
    """float32, nats, with gradient: entropy of the policy's distribution of the token. None without
    ``objective.entropy_bonus``."""
    divergence: Tensor | None = None
    """float32, nats, with gradient: divergence to the teacher at the token; exact with ``objective.form``
    full, a lower bound with top_k. None in other forms."""


@dataclass(frozen=True)
class LossOutput:
    """``per_token``: the unreduced loss, shaped like the log-probs. ``metrics``: the same shape, any names.

    No metric is required. A name that ends in ``_max`` is reduced by the maximum over tokens, any other by
    the mean; ``token_metrics.metric_key`` gives the key in metrics.jsonl. Built-in losses have ``ratio`` and
    ``ratio_max`` (w), ``kl`` and ``kl_old`` (unnormalised reverse KL to the anchor and to the old policy,
    nats), ``clip_high``, ``clip_low``, ``clip_c`` (1 where that bound acted) and ``clamped`` (1 where a
    log-ratio was outside the limit).
    """

    per_token: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

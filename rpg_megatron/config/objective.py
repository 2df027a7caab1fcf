"""Settings beside the loss: aggregation, correction, anchor, training, guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rpg_megatron.config.base import Affects, Section

ENOUGH_PROBE_TOKENS = 32
"""Minimum number of probe tokens to judge an engine: with fewer its mean may be large by chance."""
PROBE_PROMPTS, PROBE_TOKENS = 16, 8
"""Prompts that every engine answers after each weight update, sampled from the full distribution, with
rollout.ahead, top_p or top_k: a batch may have no token that can be compared. Maximum tokens of a response.
One more prompt repeats one of the weights before."""
_ENGINE_RATIO = 8.0
"""Maximum mean difference of an engine on its probes, relative to the median of the other engines."""
REWARD_FAILURES_SHARE = 0.5
"""Share of failed rewards from which ``guards.reward_failures`` acts; a smaller one is only told."""
SKIPPED_UPDATES = 5
"""Consecutive updates with non-finite gradients after which a run ends. Each is skipped: weights and
optimizer state stay unchanged."""


class CorrectionSettings(Section, affects="training"):
    """Importance-sampling factor exp(old - behaviour) on each token's loss: corrects stale rollouts and the
    engine/trainer mismatch.
    """

    type: Literal["truncate", "icepop", "geometric"]
    """truncate: at most ``high``; icepop: 0 outside [low, high]; geometric: a mask, 1 for sequences whose
    geometric mean of the tokens' ratios lies in [low, high], 0 for the others. geometric needs bounds near 1,
    such as 0.99 and 1.01."""
    level: Literal["token", "sequence"] = "token"
    """One ratio per token, or the product over the sequence (truncate, icepop)."""
    low: float = Field(0.5, ge=0, lt=1)
    """Lower bound (icepop, geometric)."""
    high: float = Field(2.0, gt=1)
    """Upper bound."""
    token_high: float | None = Field(None, gt=1)
    """geometric: the factor of a kept sequence's tokens is their own ratio, at most this; null: 1."""
    denominator: Literal["all", "kept"] = "all"
    """What the mean over tokens or sequences counts. all: those that icepop or geometric reject too, with a
    loss of 0; kept: the others only."""

    def _problems(self) -> Iterator[str]:
        default = {name: field.default for name, field in type(self).model_fields.items()}
        if self.type == "truncate" and self.low != default["low"]:
            yield "low has no effect with type truncate; remove it, or use icepop"
        if self.type == "truncate" and self.denominator != "all":
            yield (
                "denominator has no effect with type truncate, which rejects nothing; remove it, "
                "or use icepop or geometric"
            )
        if self.type != "geometric" and self.token_high is not None:
            yield f"token_high has no effect with type {self.type}; remove it, or use geometric"
        if self.type == "geometric":
            if self.level != "token":
                yield "level has no effect with type geometric, which masks sequences; remove it"
            for name in ("low", "high"):
                if getattr(self, name) == default[name]:
                    yield (
                        f"{name} must be set for type geometric: a geometric mean hardly leaves "
                        f"{default['low']} to {default['high']}; use bounds near 1, such as low 0.99 and "
                        "high 1.01"
                    )


class AggregationSettings(Section, affects="training"):
    """How token losses become the loss of a mini-batch."""

    type: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: mean over all tokens; sequence_mean: mean over sequences of their token means; constant:
    sum of a sequence over a constant (Dr.GRPO)."""


class AnchorSettings(Section, affects="training"):
    """Reference policy of the KL term. All types but ``old`` are held in host memory and swapped in."""

    type: Literal["old", "fixed", "every", "kl_trigger"] = "old"
    """old: the policy at the start of the step, as in the paper; fixed: the initial policy; every: updated to
    the policy every ``updates`` optimizer updates; kl_trigger: updated when the KL to it exceeds kappa."""
    updates: int = Field(16, ge=1)
    """every: optimizer updates between anchor updates, checked after each step."""
    kappa: float = Field(0.01, gt=0)
    """kl_trigger: the anchor is updated when the moving average of the token KL (nats) exceeds this."""


_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a plain off as false."""
_SHARED_FROM = 0.1
"""``TrainingSettings.share_prompts`` auto: the smallest share of a sequence at which its prompt is shared."""


class TrainingSettings(Section, affects="training"):
    """Number of steps, and how the batch of a step is split."""

    steps: Annotated[int, Affects("results")] = Field(400, ge=1)
    """Rollout-and-update steps."""
    minibatches: int = Field(16, ge=1)
    """Mini-batches of a step, one optimizer update each; the prompts are split evenly over them. Gradients of
    the micro-batches of a mini-batch are accumulated."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch of a step, each through all mini-batches in the same order: ppo_epochs x
    minibatches updates. The old policy in the ratio is always the one before the first update."""
    tokens_per_microbatch: Annotated[int, Affects("sums")] = Field(8192, ge=1)
    """Token budget of one packed micro-batch of a data-parallel replica, shared by its context-parallel
    ranks. A longer sequence gets a micro-batch of its own."""
    share_prompts: Annotated[bool | Literal["auto"], Affects("sums")] = False
    """Compute the prompt of a group once for all of its responses in a micro-batch, instead of once for each:
    the same log-probs and gradients up to rounding, for less work. auto: for responses of which the prompt is
    at least a tenth of the sequence; with shorter prompts it hardly pays. On a GPU auto is false where
    attention, which then takes longer, costs more than is saved; plan prints which. docs/long-context.md
    says what else changes."""
    mask_truncated: bool = False
    """Mask out the tokens of truncated responses in the loss. Their rewards still count in the advantages of
    their groups."""
    logprob_chunk: Annotated[int, Affects("sums")] = Field(1024, ge=1)
    """Number of tokens whose full-vocabulary logits are in memory at once."""
    old: Literal["auto", "pass", "update", "engine"] = "auto"
    """Where the old policy's log-probs come from. pass: a forward pass over the batch before the updates.
    update: for the first mini-batch of a step, the forward pass of its own update, whose gradients wait for
    the guards; for the others, a pass. engine: the log-probs with which the engine sampled the tokens; the
    guard on mismatch then sees the first mini-batch only. auto: update where a step is one update and the
    numbers are the same, else pass; the log of rank 0 says why. docs/objectives.md compares them."""
    router_replay: Annotated[Literal["off", "rollout"], _OFF] = "off"
    """Mixtures of experts: which experts the trainer uses for a token. off: those that its routers choose.
    rollout: those that the engine chose when it sampled the token, in log-probs and updates; in bfloat16 the
    two differ for some tokens. Benefit and cost: docs/mixture-of-experts.md."""
    router_aux_loss: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Mixtures of experts: coefficient of the auxiliary loss for load balancing (that of Switch Transformer,
    computed for each micro-batch). It is averaged over all tokens of an update, prompts included, summed over
    layers, and added to the loss; a layer with an even load contributes 1. 0: off. Formula:
    docs/mixture-of-experts.md."""

    @property
    def shared_from(self) -> float | None:
        """The smallest share of a sequence at which its prompt is shared; None: none is."""
        if self.share_prompts == "auto":
            return _SHARED_FROM
        return 0.0 if self.share_prompts else None


class GuardSettings(Section, affects="results"):
    """Checks that stop a run whose numbers are wrong."""

    mismatch: Annotated[Literal["stop", "warn", "off"], _OFF] = "stop"
    """What to do when engine and trainer log-probs of tokens sampled by the current weights differ by more
    than the bounds below."""
    mismatch_max: float | None = Field(None, gt=0)
    """Maximum |log-prob difference| of a token, in nats; null: 1e-3 in float32, no bound in bfloat16."""
    mismatch_mean: float | None = Field(None, gt=0)
    """Maximum mean |log-prob difference|, in nats; null: 1e-4 in float32, 0.05 in bfloat16."""
    uncorrected: bool = False
    """Allow rollout.ahead, or rollout.top_p and top_k, without ``correction``. The gradient is then
    biased by stale rollouts, or by the tokens that the engines never sample."""

    reward_failures: Annotated[Literal["stop", "warn", "off"], _OFF, Affects("results", evaluated=True)] = (
        "stop"
    )
    """What to do when the reward fails on at least half of the responses of a step or of a held-out set: a
    function raised, timed out, crashed, or returned no finite number; a judge gave no answer. With stop, it
    must not fail on a trial row of each data set before the start either. A smaller share only prints a
    warning. off: no warnings."""

    def _problems(self) -> Iterator[str]:
        if self.mismatch == "off" and (self.mismatch_max is not None or self.mismatch_mean is not None):
            yield "a bound is set, but guards.mismatch is off; remove one of the two"

    def engine_differs(self, mean: float, ratio: float, dtype: str) -> bool:
        """Whether the mean difference of an engine on its probes is much larger than that of the others.

        ratio: ``mean`` relative to the other engines. A mean below a fiftieth of ``mismatch_mean`` passes.
        """
        return mean > self.thresholds(dtype)[1] / 50 and ratio > _ENGINE_RATIO

    def thresholds(self, dtype: str) -> tuple[float, float]:
        """(max, mean) bounds in nats for a dtype."""
        largest, mean = {"float32": (1e-3, 1e-4)}.get(dtype, (float("inf"), 0.05))
        return self.mismatch_max or largest, self.mismatch_mean or mean

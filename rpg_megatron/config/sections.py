"""The sections of a run's settings, and what follows from several of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field

from rpg_megatron.config.advantages import AnyAdvantageSettings, RPGAdvantageSettings
from rpg_megatron.config.base import NAME, Affects, ImportedSettings, Section
from rpg_megatron.config.cluster import ClusterSettings, JobSettings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.evaluation import EvaluationSettings
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.losses import DistilSettings, ObjectiveSettings, RPGSettings
from rpg_megatron.config.objective import (
    AggregationSettings,
    AnchorSettings,
    CorrectionSettings,
    GuardSettings,
    TrainingSettings,
)
from rpg_megatron.config.policy import (
    MemorySettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    PrecisionSettings,
)
from rpg_megatron.config.profile import ProfileSettings
from rpg_megatron.config.reward import AnyRewardSettings, RewardSettings
from rpg_megatron.config.rollout import (
    BridgeSettings,
    CheckpointSettings,
    EngineSettings,
    ExportSettings,
    RolloutFilesSettings,
    RolloutSettings,
)
from rpg_megatron.config.sft import SFTSettings
from rpg_megatron.config.teacher import TeacherSettings
from rpg_megatron.config.trackers import NamedTracker, TensorBoardSettings

if TYPE_CHECKING:
    TrainingPrompts = DataSettings
else:
    TrainingPrompts = DataSettings | None  # None: a run with ``sft``, which reads no prompts


class PromptSet(NamedTuple):
    """Prompts, and the limit of their responses."""

    where: str
    """Key of the prompts in the settings, for messages."""
    data: DataSettings
    response_tokens: int
    """Maximum tokens of a response."""
    limited_by: str
    """The key that sets this."""
    samples: int
    """Responses per prompt."""
    name: str = ""
    """Of a held-out set; empty: the training set."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of a prompt and a response together."""
        return self.data.max_prompt_tokens + self.response_tokens


class Sections(Section):
    """The sections of a run's settings, and what follows from several of them."""

    name: Annotated[str, Affects("files")] = Field("run", pattern=NAME)
    """Name of the run; its folder is <runs>/<name>-NNN."""
    runs: Annotated[Path, Affects("files")] = Path("runs")
    """Folder that holds the runs, relative to the working directory."""
    seed: Annotated[int, Affects("training", evaluated=True)] = Field(0, ge=0)
    """Seed of prompt order and sampling."""
    device: Annotated[Literal["cpu", "cuda"], Affects("placement", evaluated=True)] = "cuda"
    """Device of trainer and engines."""
    model: ModelSettings
    """The checkpoint that training starts from."""
    lora: LoraSettings | None = None
    """Train low-rank adapters (LoRA) instead of all weights; null: train all."""
    parallel: ParallelSettings = ParallelSettings()
    """Parallel layout of the policy."""
    precision: PrecisionSettings = PrecisionSettings()
    """Precision of weights, activations and matrix products."""
    memory: MemorySettings = MemorySettings()
    """Activation recomputation and optimizer offload."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW or Schedule-Free AdamW."""
    objective: ObjectiveSettings = RPGSettings()
    """The loss."""
    advantage: AnyAdvantageSettings = RPGAdvantageSettings()
    """How rewards become advantages."""
    aggregation: AggregationSettings = AggregationSettings()
    """How token losses become the loss of a mini-batch."""
    correction: CorrectionSettings | None = None
    """Importance-sampling correction between rollout engine and trainer; null: none."""
    anchor: AnchorSettings = AnchorSettings()
    """Reference policy of the KL term."""
    teacher: TeacherSettings | None = None
    """A fixed policy in place of the anchor, for distillation; null: none."""
    training: TrainingSettings = TrainingSettings()
    """Number of steps, mini-batches and micro-batches."""
    data: TrainingPrompts = None  # type: ignore[assignment]
    """Training prompts. Required, but not used with sft."""
    sft: SFTSettings | None = None
    """Supervised fine-tuning instead of reinforcement learning; null: none."""
    reward: AnyRewardSettings = RewardSettings()
    """Reward function."""
    rollout: RolloutSettings = RolloutSettings()
    """Rollout sampling."""
    engine: EngineSettings = EngineSettings()
    """vLLM rollout engines."""
    evaluation: Annotated[EvaluationSettings | None, Affects("results", evaluated=True)] = None
    """Evaluation on held-out problems; null: none."""
    guards: GuardSettings = GuardSettings()
    """Checks that warn or stop the run."""
    bridge: BridgeSettings = BridgeSettings()
    """Weight sync from trainer to engines."""
    export: ExportSettings = ExportSettings()
    """Hugging Face checkpoint written at the end."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Training checkpoints, to resume from."""
    rollouts: RolloutFilesSettings = RolloutFilesSettings()
    """The saved rollouts of each step."""
    cluster: ClusterSettings = ClusterSettings()
    """Multi-node placement and network."""
    job: JobSettings = JobSettings()
    """Restarts of a batch job."""
    profile: ProfileSettings = ProfileSettings()
    """Profiler traces."""
    trackers: tuple[NamedTracker, ...] = (TensorBoardSettings(),)
    """Where metrics go besides metrics.jsonl: a list of tensorboard, wandb and mlflow, or of sections such as
    {type: wandb, project: math}; your own by import path; docs/trackers.md. []: none."""

    def changed(self, **sections: dict[str, Any]) -> Self:
        """These settings with other values of keys in some sections."""
        new = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=new)

    @property
    def full_divergence(self) -> Literal["rkl", "fkl"] | None:
        """The divergence to the teacher that is computed over the whole vocabulary; None: none is."""
        loss = self.objective
        return loss.divergence if isinstance(loss, DistilSettings) and loss.form == "full" else None

    @property
    def top_divergence(self) -> Literal["rkl", "fkl"] | None:
        """The divergence to the likeliest tokens of a teacher's server; None: they are not asked for."""
        loss = self.objective
        return loss.divergence if isinstance(loss, DistilSettings) and loss.form == "top_k" else None

    @property
    def serves_adapters(self) -> bool:
        """Whether engines apply adapters themselves, beside weights that they get once."""
        return self.lora is not None and self.lora.publish == "adapters"

    def has_fused_layers(self, device: str) -> bool:
        """Whether layers are Transformer Engine's on this kind of device (cpu, cuda), if it is installed."""
        fits = device == "cuda" and self.precision.dtype == "bfloat16"
        return fits and self.model.implementation != "local"

    @property
    def old_from(self) -> Literal["pass", "update", "engine"]:
        """``training.old`` without auto; pass with ``sft``, whose loss has no old policy."""
        if self.sft is not None:
            return "pass"
        if self.training.old != "auto":
            return self.training.old
        return "pass" if any(self.reasons_for_pass()) else "update"

    @property
    def scoring_passes(self) -> float:
        """Forward passes over a step's batch before its updates: of the policy, and of a held anchor."""
        if self.sft is not None:
            return 0.0
        own = {"pass": 1.0, "update": 1 - 1 / self.training.minibatches, "engine": 0.0}
        return own[self.old_from] + (self.anchor.type != "old")

    def reasons_for_pass(self) -> Iterator[str]:
        """Why auto computes the old policy's log-probs by a pass before the updates."""
        yield from self.excludes_old_from_update()
        for key in ("minibatches", "ppo_epochs"):
            if (count := getattr(self.training, key)) > 1:
                yield f"training.{key} {count}: a step has several updates"

    def excludes_old_from_update(self) -> Iterator[str]:
        """Settings that need these log-probs before the first update, or change its forward pass."""
        if self.reward.kl is not None:
            yield "reward.kl: advantages depend on the log-probs"
        if divergence := self.full_divergence or self.top_divergence:
            yield f"objective.divergence {divergence} to a teacher takes the place of entropies in the update"
        if self.optimizer.type == "schedule_free_adamw":
            yield "optimizer.type schedule_free_adamw takes gradients at other weights than engines have"
        if self.precision.fp8 is not None and self.precision.fp8.recipe == "delayed":
            yield "precision.fp8.recipe delayed: scales change from one forward pass to the next"
        kept = self.correction is not None and self.correction.denominator == "kept"
        if kept and self.training.router_aux_loss:
            yield "correction.denominator kept: training.router_aux_loss needs the number of kept tokens"

    def notes(self) -> Iterator[str]:
        """Advice on settings that work, but rarely pay."""
        if self.rollout.ahead and self.training.router_replay == "rollout":
            yield (
                "training.router_replay with rollout.ahead trains most tokens through experts that the "
                "current router would not choose, and may not reduce the mismatch; compare "
                "routes/own_mismatch_mean with routes/replayed_mismatch_mean, or turn one of the two off"
            )

    @property
    def tokens_at_once(self) -> int:
        """Maximum tokens of a micro-batch on a rank: the token budget, or the longest sequence."""
        return -(-max(self.training.tokens_per_microbatch, self.longest) // self.parallel.context)

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """``memory.recompute`` without auto."""
        return self.memory.recompute_for(self.tokens_at_once)

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence in training."""
        if self.sft is not None:
            return self.sft.data.max_tokens
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def sequences(self) -> int:
        """Responses or conversations of a step."""
        if self.sft is not None:
            return self.sft.batch_size
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def minibatches(self) -> int:
        """Mini-batches of a step."""
        return 1 if self.sft is not None else self.training.minibatches

    @property
    def temperature(self) -> float:
        """Temperature of the trained distribution."""
        return 1.0 if self.sft is not None else self.rollout.temperature

    def prompts(self, command: str) -> DataSettings:
        """The training prompts, for a command. Raises UserError in a fine-tuning run, which has none."""
        if self.sft is not None:
            raise UserError(f"{command} needs training prompts, which a fine-tuning run (sft) has not")
        return self.data

    @property
    def needs_rows(self) -> bool:
        """Whether code of the user may read the rows of the data."""
        return self.reward.has_custom or self.rollout.episode is not None

    @property
    def prompt_sets(self) -> list[PromptSet]:
        """The prompts of training, and each held-out set."""
        limit = self.rollout.max_response_tokens
        sets = []
        if self.sft is None:
            samples = self.rollout.samples_per_prompt
            sets.append(PromptSet("data", self.data, limit, "rollout.max_response_tokens", samples))
        for part in self.evaluation.heldout if self.evaluation is not None else ():
            tokens, limited_by = part.response_tokens(limit), part.limited_by
            sets.append(PromptSet(part.where, part.data, tokens, limited_by, part.samples, part.name))
        return sets

    @property
    def chats(self) -> bool:
        """Whether the policy reads or learns chats, written by the tokenizer's template."""
        sections = [part.data for part in self.prompt_sets]
        sections += [part for _, part in self.sft.parts] if self.sft is not None else []
        return self.rollout.episode is not None or any(section.chat for section in sections)

    @property
    def uses_rewards(self) -> bool:
        """Whether rewards train the policy; distillation may only measure them."""
        return not isinstance(self.objective, DistilSettings) or self.objective.reward > 0

    @property
    def compares_within_groups(self) -> bool:
        """Whether a group of equal rewards has no learning signal."""
        advantage = self.advantage
        across_groups = isinstance(advantage, ImportedSettings) or advantage.across_groups
        return self.uses_rewards and not across_groups and self.rollout.samples_per_prompt > 1

    @property
    def compares_engines(self) -> bool:
        """Whether the mismatch guard compares engines with each other, by their probes."""
        return self.guards.mismatch != "off" and self.rollout.probed and self.engine.replicas > 1

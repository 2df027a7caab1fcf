"""The settings of a run: read from YAML and key=value pairs, checked without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError, model_validator

from rpg_megatron.config.advantages import AnyAdvantageSettings, RPGAdvantageSettings
from rpg_megatron.config.base import NAME, Affects, ImportedSettings, Section
from rpg_megatron.config.cluster import ClusterSettings, JobSettings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.evaluation import EvaluationSettings
from rpg_megatron.config.explanation import explain_errors
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.losses import DistilSettings, ObjectiveSettings, RPGSettings
from rpg_megatron.config.merging import apply_override, read_merged
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
from rpg_megatron.config.renamed import remove_gone
from rpg_megatron.config.reward import AnyRewardSettings, RewardSettings
from rpg_megatron.config.rollout import (
    BridgeSettings,
    CheckpointSettings,
    EngineSettings,
    ExportSettings,
    KeepBestSettings,
    RolloutFilesSettings,
    RolloutSettings,
)
from rpg_megatron.config.secret_values import refuse_secrets
from rpg_megatron.config.sft import SFTSettings
from rpg_megatron.config.teacher import TeacherSettings
from rpg_megatron.config.trackers import NamedTracker, TensorBoardSettings

if TYPE_CHECKING:
    TrainingPrompts = DataSettings
else:
    TrainingPrompts = DataSettings | None  # None: a run with ``sft``, which reads no prompts
USE_TOOLS = "rpg_megatron.environments.tools:use_tools"
"""The episode that needs other settings."""


class PromptSet(NamedTuple):
    """Prompts, and the limit of their responses."""

    where: str
    """Key of the prompts in the settings, for messages."""
    data: DataSettings
    response_tokens: int
    """Maximum tokens of a response."""
    limited_by: str
    """The key that sets this."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of a prompt and a response together."""
        return self.data.max_prompt_tokens + self.response_tokens


class Settings(Section):
    """All settings of a run."""

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

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, raw: Any) -> Any:
        refuse_secrets(raw)
        return raw

    @model_validator(mode="before")
    @classmethod
    def _default_replicas(cls, raw: Any) -> Any:
        """Fine-tuning needs engines only for its evaluation."""
        if not isinstance(raw, dict) or raw.get("sft") is None or raw.get("evaluation") is not None:
            return raw
        engine = raw.get("engine", {})
        none = {"replicas": 0, "colocated": False}
        return raw | {"engine": engine | none} if isinstance(engine, dict) else raw

    @model_validator(mode="before")
    @classmethod
    def _default_transport(cls, raw: Any) -> Any:
        """The default of bridge.transport depends on the device."""
        if not isinstance(raw, dict) or raw.get("device", "cuda") != "cuda":
            return raw
        bridge = raw.get("bridge", {})
        if not isinstance(bridge, dict) or "transport" in bridge:
            return raw
        return raw | {"bridge": bridge | {"transport": "cuda_ipc"}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        if self.sft is None and self.data is None:
            raise ValueError("data is missing: the training prompts; for supervised fine-tuning add sft")
        prompts, parts = self.rollout.prompts_per_step, self.training.minibatches
        if self.sft is None and prompts % parts:
            raise ValueError(
                f"rollout.prompts_per_step ({prompts}) must be a multiple of training.minibatches ({parts}); "
                f"try {prompts - prompts % parts or parts}"
            )
        overlong, longest = self.reward.overlong, self.rollout.max_response_tokens
        if overlong is not None and overlong.buffer is not None and overlong.buffer > longest:
            raise ValueError(
                f"reward.overlong.buffer ({overlong.buffer}) is longer than a response "
                f"(rollout.max_response_tokens {longest}); try {max(longest // 4, 1)}"
            )
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def problems(self) -> Iterator[str]:
        """Settings that would have no effect, or conflict with others; none in settings that were loaded."""
        yield from self._sft_problems()
        yield from self._teacher_problems()
        yield from self._lora_problems()
        if self.parallel.sequence and self.parallel.tensor == 1:
            yield "parallel.sequence needs parallel.tensor of 2 or more"
        kind = self.objective.type
        if self.anchor.type != "old" and not self.objective.has_kl and self.reward.kl is None:
            yield f"objective.type {kind} has no KL term, so anchor.type has no effect; set it to old"
        if self.anchor.type == "kl_trigger" and not self.objective.has_kl:
            yield f"anchor.type kl_trigger needs a loss with a KL term, unlike {kind}; use fixed or every"
        if self.anchor.type == "old" and self.reward.kl is not None:
            yield "reward.kl needs a reference model: set anchor.type to fixed or every, or remove reward.kl"
        if missing := self._missing_baseline_settings():
            lines = " and ".join(f"{key} to {value}" for key, value in missing.items())
            yield f"objective.type {kind} alone is not the published algorithm; set {lines}"
        if self.bridge.transport == "cuda_ipc" and self.device != "cuda":
            yield "bridge.transport cuda_ipc needs device cuda; use shared_memory"
        workers = self.engine.replicas * self.engine.tensor
        if self.engine.colocated and workers > self.parallel.world:
            yield (
                f"engine.colocated: {workers} engine workers (engine: replicas x tensor) share the GPUs of "
                f"{self.parallel.world} trainer ranks (parallel: tensor x pipeline x context x data); lower "
                "the first or raise the second"
            )
        if self.device == "cpu" and (self.profile.memory or self.profile.nvtx):
            yield f"profile.{'memory' if self.profile.memory else 'nvtx'} needs device cuda; set it to false"
        if (rank := max(self.profile.ranks)) >= self.parallel.world:
            yield f"profile.ranks: there is no rank {rank}; the last one is {self.parallel.world - 1}"
        kinds = [tracker.type for tracker in self.trackers]
        if twice := next((kind for i, kind in enumerate(kinds) if kind in kinds[:i]), None):
            yield f"trackers has {twice} twice; remove one of the two"
        if self.rollouts.keep is not None and self.checkpoint.every is None:
            yield "rollouts.keep needs checkpoints; set checkpoint.every, or rollouts.keep to null"
        if self.checkpoint.keep_best is not None:
            yield from self._keep_best_problems(self.checkpoint.keep_best)
        if self.device == "cpu" and self.engine.quantization is not None:
            yield f"engine.quantization {self.engine.quantization} needs device cuda; set it to null"
        if self.device == "cpu" and "--enable-expert-parallel" in self.engine.arguments:
            yield (
                "engine.arguments: --enable-expert-parallel needs device cuda: vLLM's experts on a CPU crash "
                "with it; remove it (engine.tensor splits every expert over the workers)"
            )
        yield from self._tool_problems()
        yield from self._async_problems()
        yield from self._old_problems()
        yield from self._router_replay_problems()
        yield from self._shared_prompt_problems()
        yield from self._transformer_engine_problems()
        if self.bridge.transport != "process_group":
            for key, field in BridgeSettings.model_fields.items():
                if key != "transport" and getattr(self.bridge, key) != field.default:
                    yield f"bridge.{key} has no effect unless bridge.transport is process_group"
        if self.memory.offload_optimizer:
            yield from self._offloading_problems()
        if self.correction is not None:
            yield from self.correction.problems()

    def _sft_problems(self) -> Iterator[str]:
        if self.sft is None:
            if not self.engine.replicas:
                yield "engine.replicas 0 is for sft without evaluation only; set it to 1 or more"
            return
        if self.data is not None:
            yield "data has no effect with sft, which trains on sft.data; remove it"
        for key in ("objective", "advantage", "correction", "anchor", "teacher"):
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} has no effect with sft, whose loss is -log p; remove it"
        defaults = TrainingSettings()
        for key, instead in {
            "minibatches": "each step is one update on sft.batch_size conversations",
            "epochs": "use sft.epochs",
            "mask_truncated": "use sft.data.too_long",
            "old": "its loss has no old policy",
            "router_replay": "no engine has routed the tokens",
        }.items():
            if getattr(self.training, key) not in (getattr(defaults, key), 1):
                yield f"training.{key} has no effect with sft: {instead}; remove it"
        if self.rollout.ahead:
            yield "rollout.ahead has no effect with sft; remove it"

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

    def _teacher_problems(self) -> Iterator[str]:
        loss = self.objective
        if self.teacher is None:
            if isinstance(loss, DistilSettings):
                yield "objective.type distil needs a teacher; set teacher.path or teacher.url"
            return
        if self.anchor.type != "old":
            yield "teacher takes the place of the anchor; remove anchor.type"
        if not loss.has_kl:
            yield f"objective.type {loss.type} has no KL term, so teacher has no effect; use distil or rpg"
        if self.rollout.temperature != 1:
            yield "teacher needs rollout.temperature 1: the distribution that it gives"
        if self.full_divergence is not None and self.teacher.path is None:
            yield "objective.form full needs the teacher's full distribution: set teacher.path, or form token"
        uses_top = isinstance(loss, DistilSettings) and loss.form == "top_k"
        if uses_top != (self.teacher.top_k is not None):
            yield "objective.form top_k and teacher.top_k need each other; set both, or none"
        if self.reward.kl is not None:
            yield "reward.kl and teacher exclude each other; use objective.type distil with objective.reward"

    @property
    def serves_adapters(self) -> bool:
        """Whether engines apply adapters themselves, beside weights that they get once."""
        return self.lora is not None and self.lora.publish == "adapters"

    def _lora_problems(self) -> Iterator[str]:
        if self.lora is None:
            if self.model.adapter is not None:
                yield "model.adapter needs lora, with the rank, alpha and targets of that adapter; add it"
            return
        if self.lora.publish == "merged" and not self.engine.replicas:
            yield "lora.publish merged has no effect without engines (engine.replicas 0); remove it"
        if self.lora.publish == "merged" and self.precision.dtype != "float32":
            yield (
                f"lora.publish merged needs precision.dtype float32: W + scale B A rounded to "
                f"{self.precision.dtype} loses most of a small update, so engines would not sample from the "
                "policy; use adapters"
            )

    def _tool_problems(self) -> Iterator[str]:
        if self.rollout.episode is None or self.rollout.episode.type != USE_TOOLS:
            return
        if self.rollout.tool_call_parser is None:
            yield "rollout.episode use_tools needs rollout.tool_call_parser, which finds calls in the text"
        if self.data.chat:
            yield (
                "data.chat: use_tools sends the prompt as a message, which gets the chat template then; set "
                "it to false"
            )

    def _keep_best_problems(self, best: KeepBestSettings) -> Iterator[str]:
        if self.evaluation is None:
            yield "checkpoint.keep_best needs an evaluation; add one, or set keep_best to null"
            return
        if self.checkpoint.every is None:
            yield "checkpoint.keep_best needs checkpoints; set checkpoint.every, or keep_best to null"
        known = self.evaluation.metric_names()
        if best.metric is not None and best.metric not in known:
            yield (
                f"checkpoint.keep_best.metric: the evaluation has no metric {best.metric!r}; use one of "
                f"{', '.join(known)}"
            )

    def _async_problems(self) -> Iterator[str]:
        ahead = self.rollout.ahead
        if ahead and self.engine.colocated:
            yield (
                "rollout.ahead excludes engine.colocated: engines on the trainer's GPUs cannot sample "
                "during training; use separate GPUs (engine.colocated=false), or set rollout.ahead to 0"
            )
        if self.training.old != "engine":
            yield from self.guards.problems_of_correction(ahead, self.rollout.restricted, self.correction)

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
        yield from self._excludes_old_from_update()
        for key in ("minibatches", "epochs"):
            if (count := getattr(self.training, key)) > 1:
                yield f"training.{key} {count}: a step has several updates"

    def _excludes_old_from_update(self) -> Iterator[str]:
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

    def _old_problems(self) -> Iterator[str]:
        old = self.training.old
        if old not in ("update", "engine") or self.sft is not None:
            return
        for reason in self._excludes_old_from_update():
            yield f"training.old {old} excludes {reason}; set it to auto"
        if old == "update":
            return
        if self.correction is not None:
            yield (
                "training.old engine: ratios are relative to the probabilities with which tokens were "
                "sampled, so correction has no effect; remove it"
            )
        if restricted := self.rollout.restricted:
            yield (
                f"training.old engine excludes rollout.{restricted}: the engine's log-probs are relative to "
                "a part of the distribution; set training.old to auto"
            )
        if self.guards.mismatch == "off":
            yield (
                "training.old engine needs guards.mismatch stop or warn: nothing else would compare engine "
                "and trainer"
            )
        if self.guards.uncorrected:
            yield "guards.uncorrected has no effect with training.old engine; remove it"

    def notes(self) -> Iterator[str]:
        """Advice on settings that work, but rarely pay."""
        if self.rollout.ahead and self.training.router_replay == "rollout":
            yield (
                "training.router_replay with rollout.ahead trains most tokens through experts that the "
                "current router would not choose, and may not reduce the mismatch; compare "
                "routes/own_mismatch_mean with routes/replayed_mismatch_mean, or turn one of the two off"
            )

    def _router_replay_problems(self) -> Iterator[str]:
        if self.training.router_replay == "off":
            if self.rollout.journal_routes:
                yield "rollout.journal_routes has no effect unless training.router_replay is set; remove it"
            return
        recompute = self.memory.recompute_for(self.tokens_at_once)
        if self.parallel.pipeline > 1 and recompute == "selective":
            chosen = "" if self.memory.recompute else ", chosen for micro-batches of this size,"
            yield (
                f"memory.recompute selective{chosen} excludes training.router_replay with parallel.pipeline "
                "of 2 or more: routers would be recomputed with the routes of a later micro-batch; set "
                "memory.recompute to full or none"
            )
        yield from self.engine.problems_of_routes()

    def _shared_prompt_problems(self) -> Iterator[str]:
        if not self.training.share_prompts:
            return
        if self.device == "cuda" and self.precision.dtype == "float32":
            yield (
                "training.share_prompts needs precision.dtype bfloat16 with device cuda: FlashAttention, "
                "which takes shared prompts there, does not support float32; set it to false"
            )
        if self.sft is not None or self.rollout.samples_per_prompt == 1:
            why = "rollout.samples_per_prompt is 1" if self.sft is None else "conversations share no prompts"
            yield f"training.share_prompts has no effect: {why}; remove it"

    def _missing_baseline_settings(self) -> dict[str, str]:
        """What the objective's published algorithm requires besides its loss: key -> value.

        Only defaults are reported: they are RPG's, and not part of the named algorithm.
        """
        loss = self.objective
        missing: dict[str, str] = {}
        if isinstance(loss, ImportedSettings):
            return missing
        if self.advantage.type == "rpg" and loss.advantages:
            missing["advantage.type"] = loss.advantages[0]
        if loss.needs_anchor and self.anchor.type == "old" and self.teacher is None:
            missing["anchor.type"] = "fixed (or objective.beta to 0: no KL)"
        if loss.aggregation not in (None, self.aggregation.type):
            missing["aggregation.type"] = loss.aggregation
        return missing

    def _offloading_problems(self) -> Iterator[str]:
        if self.device != "cuda":
            yield (
                "memory.offload_optimizer needs device cuda: on a CPU the optimizer is already in host "
                "memory; set it to 0"
            )
        if self.optimizer.type != "adamw" or not self.optimizer.distributed:
            yield "memory.offload_optimizer needs optimizer.type adamw with optimizer.distributed true"
        if self.precision.dtype != "bfloat16":
            yield "memory.offload_optimizer needs precision.dtype bfloat16: Megatron cannot resume others"
        if self.precision.fp8 is not None and self.precision.fp8.parameters:
            yield "memory.offload_optimizer excludes precision.fp8.parameters; remove one of them"

    def _transformer_engine_problems(self) -> Iterator[str]:
        fp8, implementation = self.precision.fp8, self.model.implementation
        if self.device == "cpu" and fp8 is not None and fp8.parameters:
            yield "precision.fp8.parameters needs device cuda: a CPU only emulates products; set it to false"
        if self.device == "cpu" and implementation == "transformer_engine":
            yield "model.implementation transformer_engine needs device cuda; use auto or local"
        if self.precision.dtype == "float32" and implementation == "transformer_engine":
            yield (
                "model.implementation transformer_engine needs precision.dtype bfloat16: its attention does "
                "not support float32; use auto or local"
            )
        if self.device == "cuda" and fp8 is not None and implementation == "local":
            yield "precision.fp8 needs Transformer Engine's layers; set model.implementation to auto"
        if fp8 is not None and fp8.parameters and not self.optimizer.distributed:
            yield "precision.fp8.parameters needs optimizer.distributed: it keeps the float32 master weights"
        if fp8 is not None and fp8.parameters and self.anchor.type != "old":
            yield (
                f"precision.fp8.parameters excludes anchor.type {self.anchor.type}, whose weights are "
                "swapped in; set precision.fp8.parameters to false or anchor.type to old"
            )

    @property
    def tokens_at_once(self) -> int:
        """Maximum tokens of a micro-batch on a rank: the token budget, or the longest sequence."""
        return -(-max(self.training.tokens_per_microbatch, self.longest) // self.parallel.context)

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
            sets.append(PromptSet("data", self.data, limit, "rollout.max_response_tokens"))
        for part in self.evaluation.heldout if self.evaluation is not None else ():
            sets.append(PromptSet(part.where, part.data, part.response_tokens(limit), part.limited_by))
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

    def to_yaml(self) -> str:
        """All settings, defaults included, as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_settings(file: Path, overrides: list[str] | None = None) -> Settings:
    """Read a YAML file and apply ``key.sub=value`` overrides (values are YAML).

    Paths of inputs are taken relative to the YAML file; in an override, to the working directory.
    ``extends: FILE`` (or a list of files; later ones override earlier ones) inherits from other files.
    Raises UserError that names the file and key, and for an unknown key the nearest valid one.
    """
    return make_settings(read_merged(file, Settings), overrides, str(file))


def make_settings(raw: dict[str, Any], overrides: list[str] | None, where: str) -> Settings:
    """Apply ``key.sub=value`` overrides to plain values, and check them.

    Raises UserError that begins with ``where`` and names the key.
    """
    for item in overrides or []:
        apply_override(raw, item)
    remove_gone(raw)
    try:
        return Settings.model_validate(raw)
    except ValidationError as e:
        raise UserError(explain_errors(Settings, where, e)) from None

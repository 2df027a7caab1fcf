"""Settings that conflict with others, or that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from rpg_megatron.config.base import ImportedSettings, own_tag
from rpg_megatron.config.losses import DistilSettings, GRPOSettings
from rpg_megatron.config.objective import TrainingSettings
from rpg_megatron.config.rollout import KeepBestSettings
from rpg_megatron.config.sections import Sections

USE_TOOLS = "rpg_megatron.environments.tools:use_tools"
"""The episode that needs other settings."""


def find_problems(s: Sections) -> Iterator[str]:
    """Settings that would have no effect, or conflict with others; none in settings that were loaded."""
    yield from _sft_problems(s)
    yield from _teacher_problems(s)
    yield from _lora_problems(s)
    if s.parallel.sequence and s.parallel.tensor == 1:
        yield "parallel.sequence needs parallel.tensor of 2 or more"
    kind = s.objective.type
    if s.anchor.type != "old" and not s.objective.has_kl and s.reward.kl is None:
        yield f"objective.type {kind} has no KL term, so anchor.type has no effect; set it to old"
    if s.anchor.type == "kl_trigger" and not s.objective.has_kl:
        yield f"anchor.type kl_trigger needs a loss with a KL term, unlike {kind}; use fixed or every"
    if s.anchor.type == "old" and s.reward.kl is not None:
        yield "reward.kl needs a reference model: set anchor.type to fixed or every, or remove reward.kl"
    if missing := _missing_baseline_settings(s):
        yield f"objective.type {kind} alone is not the published algorithm; set {' and '.join(missing)}"
    if s.bridge.transport == "cuda_ipc" and s.device != "cuda":
        yield "bridge.transport cuda_ipc needs device cuda; use shared_memory"
    workers = s.engine.replicas * s.engine.tensor
    if s.engine.colocated and workers > s.parallel.world:
        yield (
            f"engine.colocated: {workers} engine workers (engine: replicas x tensor) share the GPUs of "
            f"{s.parallel.world} trainer ranks (parallel: tensor x pipeline x context x data); lower "
            "the first or raise the second"
        )
    if s.device == "cpu" and (s.profile.memory or s.profile.nvtx):
        yield f"profile.{'memory' if s.profile.memory else 'nvtx'} needs device cuda; set it to false"
    if (rank := max(s.profile.ranks)) >= s.parallel.world:
        yield f"profile.ranks: there is no rank {rank}; the last one is {s.parallel.world - 1}"
    kinds = [tracker.type for tracker in s.trackers]
    if twice := next((kind for i, kind in enumerate(kinds) if kind in kinds[:i]), None):
        yield f"trackers has {twice} twice; remove one of the two"
    if s.rollouts.keep is not None and s.checkpoint.every is None:
        yield "rollouts.keep needs checkpoints; set checkpoint.every, or rollouts.keep to null"
    if s.checkpoint.keep_best is not None:
        yield from _keep_best_problems(s, s.checkpoint.keep_best)
    if s.device == "cpu" and s.engine.quantization is not None:
        yield f"engine.quantization {s.engine.quantization} needs device cuda; set it to null"
    if s.device == "cpu" and "--enable-expert-parallel" in s.engine.arguments:
        yield (
            "engine.arguments: --enable-expert-parallel needs device cuda: vLLM's experts on a CPU crash "
            "with it; remove it (engine.tensor splits every expert over the workers)"
        )
    yield from _tool_problems(s)
    yield from _async_problems(s)
    yield from _old_problems(s)
    yield from _router_replay_problems(s)
    yield from _shared_prompt_problems(s)
    yield from _transformer_engine_problems(s)
    if s.memory.offload_optimizer:
        yield from _offloading_problems(s)


def _sft_problems(s: Sections) -> Iterator[str]:
    if s.sft is None:
        if not s.engine.replicas:
            yield "engine.replicas 0 is for sft without evaluation only; set it to 1 or more"
        return
    if s.data is not None:
        yield "data has no effect with sft, which trains on sft.data; remove it"
    for key in ("objective", "advantage", "correction", "anchor", "teacher"):
        if getattr(s, key) != type(s).model_fields[key].default:
            yield f"{key} has no effect with sft, whose loss is -log p; remove it"
    if s.reward.kl is not None:
        yield "reward.kl has no effect with sft, which has no rewards; remove it"
    defaults = TrainingSettings()
    for key, instead in {
        "minibatches": "each step is one update on sft.batch_size conversations",
        "ppo_epochs": "use sft.epochs",
        "mask_truncated": "use sft.data.too_long",
        "old": "its loss has no old policy",
        "router_replay": "no engine has routed the tokens",
    }.items():
        if getattr(s.training, key) not in (getattr(defaults, key), 1):
            yield f"training.{key} has no effect with sft: {instead}; remove it"
    for key, field in type(s.rollout).model_fields.items():
        evaluated = key == "episode" or getattr(own_tag(field), "evaluated", False)
        if not evaluated and getattr(s.rollout, key) != field.default:
            yield f"rollout.{key} has no effect with sft; remove it"


def _teacher_problems(s: Sections) -> Iterator[str]:
    loss = s.objective
    if s.teacher is None:
        if isinstance(loss, DistilSettings):
            yield "objective.type distil needs a teacher; set teacher.path or teacher.url"
        return
    if s.anchor.type != "old":
        yield "teacher takes the place of the anchor; remove anchor.type"
    if not loss.has_kl:
        yield f"objective.type {loss.type} has no KL term, so teacher has no effect; use distil or rpg"
    if s.rollout.temperature != 1:
        yield "teacher needs rollout.temperature 1: the distribution that it gives"
    if s.full_divergence is not None and s.teacher.path is None:
        yield "objective.form full needs the teacher's full distribution: set teacher.path, or form token"
    uses_top = isinstance(loss, DistilSettings) and loss.form == "top_k"
    if uses_top != (s.teacher.top_k is not None):
        yield "objective.form top_k and teacher.top_k need each other; set both, or none"
    if s.reward.kl is not None:
        yield "reward.kl and teacher exclude each other; use objective.type distil with objective.reward"


def _lora_problems(s: Sections) -> Iterator[str]:
    if s.lora is None:
        if s.model.adapter is not None:
            yield "model.adapter needs lora, with the rank, alpha and targets of that adapter; add it"
        return
    if s.optimizer.type == "muon":
        yield "lora excludes optimizer.type muon: a product of two low-rank matrices has no orthogonal step"
    if s.lora.publish == "merged" and not s.engine.replicas:
        yield "lora.publish merged has no effect without engines (engine.replicas 0); remove it"
    if s.lora.publish == "merged" and s.precision.dtype != "float32":
        yield (
            f"lora.publish merged needs precision.dtype float32: W + scale B A rounded to "
            f"{s.precision.dtype} loses most of a small update, so engines would not sample from the "
            "policy; use adapters"
        )


def _tool_problems(s: Sections) -> Iterator[str]:
    if s.rollout.episode is None or s.rollout.episode.type != USE_TOOLS:
        return
    if s.rollout.tool_call_parser is None:
        yield "rollout.episode use_tools needs rollout.tool_call_parser, such as hermes, to find calls"
    if s.data.chat:
        yield (
            "data.chat: use_tools sends the prompt as a message, which gets the chat template then; set "
            "it to false"
        )


def _keep_best_problems(s: Sections, best: KeepBestSettings) -> Iterator[str]:
    if s.evaluation is None:
        yield "checkpoint.keep_best needs an evaluation; add one, or set keep_best to null"
        return
    if s.checkpoint.every is None:
        yield "checkpoint.keep_best needs checkpoints; set checkpoint.every, or keep_best to null"
    known = s.evaluation.metric_names()
    if best.metric is not None and best.metric not in known:
        yield (
            f"checkpoint.keep_best.metric: the evaluation has no metric {best.metric!r}; use one of "
            f"{', '.join(known)}"
        )


def _async_problems(s: Sections) -> Iterator[str]:
    ahead = s.rollout.ahead
    if ahead and s.engine.colocated:
        yield (
            "rollout.ahead excludes engine.colocated: engines on the trainer's GPUs cannot sample "
            "during training; use separate GPUs (engine.colocated=false), or set rollout.ahead to 0"
        )
    if s.training.old == "engine":
        return
    restricted, correction, uncorrected = s.rollout.restricted, s.correction, s.guards.uncorrected
    if correction is None and not uncorrected:
        remedy = "set correction.type to truncate or icepop, or guards.uncorrected to true"
        if ahead:
            yield f"rollout.ahead needs a correction, since older weights sample the responses: {remedy}"
        if restricted:
            yield (
                f"rollout.{restricted} needs a correction, since responses are sampled from a part of "
                f"the trained distribution: {remedy}"
            )
    if restricted and correction is not None and correction.level == "sequence":
        yield (
            f"rollout.{restricted} excludes correction.level sequence: the ratio of a long response goes "
            "to 0, since each token is sampled from a part of the distribution; set correction.level to "
            "token"
        )
    if restricted and correction is not None and correction.type == "geometric":
        yield (
            f"rollout.{restricted} excludes correction.type geometric: it would reject responses by how "
            "much of the distribution was kept for their tokens; use truncate or icepop"
        )
    if uncorrected and (correction is not None or not (ahead or restricted)):
        why = "correction is set" if ahead or restricted else "rollout.ahead is 0"
        yield f"guards.uncorrected has no effect: {why}; remove it"


def _old_problems(s: Sections) -> Iterator[str]:
    old = s.training.old
    if old not in ("update", "engine") or s.sft is not None:
        return
    for reason in s.excludes_old_from_update():
        yield f"training.old {old} excludes {reason}; set it to auto"
    if old == "update":
        return
    if s.correction is not None:
        yield (
            "training.old engine: ratios are relative to the probabilities with which tokens were "
            "sampled, so correction has no effect; remove it"
        )
    if restricted := s.rollout.restricted:
        yield (
            f"training.old engine excludes rollout.{restricted}: the engine's log-probs are relative to "
            "a part of the distribution; set training.old to auto"
        )
    if s.guards.mismatch == "off":
        yield (
            "training.old engine needs guards.mismatch stop or warn: nothing else would compare engine "
            "and trainer"
        )
    if s.guards.uncorrected:
        yield "guards.uncorrected has no effect with training.old engine; remove it"


def _router_replay_problems(s: Sections) -> Iterator[str]:
    if s.training.router_replay == "off":
        if s.rollout.journal_routes:
            yield "rollout.journal_routes has no effect unless training.router_replay is set; remove it"
        return
    recompute = s.recompute
    if s.parallel.pipeline > 1 and recompute == "selective":
        chosen = "" if s.memory.recompute else ", chosen for micro-batches of this size,"
        yield (
            f"memory.recompute selective{chosen} excludes training.router_replay with parallel.pipeline "
            "of 2 or more: routers would be recomputed with the routes of a later micro-batch; set "
            "memory.recompute to full or none"
        )
    yield from s.engine.problems_of_routes()


def _shared_prompt_problems(s: Sections) -> Iterator[str]:
    if not s.training.share_prompts:
        return
    if s.device == "cuda" and s.precision.dtype == "float32":
        yield (
            "training.share_prompts needs precision.dtype bfloat16 with device cuda: FlashAttention, "
            "which takes shared prompts there, does not support float32; set it to false"
        )
    if s.sft is not None or s.rollout.samples_per_prompt == 1:
        why = "rollout.samples_per_prompt is 1" if s.sft is None else "conversations share no prompts"
        yield f"training.share_prompts has no effect: {why}; remove it"


def _missing_baseline_settings(s: Sections) -> list[str]:
    """What the objective's published algorithm requires besides its loss.

    Only defaults are reported: they are RPG's, and not part of the named algorithm.
    """
    loss, missing = s.objective, []
    if isinstance(loss, ImportedSettings):
        return []
    if s.advantage.type == "rpg" and loss.advantages:
        missing.append(f"advantage.type to {loss.advantages[0]}")
    if isinstance(loss, GRPOSettings) and loss.beta and s.anchor.type == "old" and s.teacher is None:
        missing.append("anchor.type to fixed (or objective.beta to 0: no KL)")
    if loss.aggregation not in (None, s.aggregation.type):
        missing.append(f"aggregation.type to {loss.aggregation}")
    return missing


def _offloading_problems(s: Sections) -> Iterator[str]:
    if s.device != "cuda":
        yield (
            "memory.offload_optimizer needs device cuda: on a CPU the optimizer is already in host "
            "memory; set it to 0"
        )
    if s.optimizer.type != "adamw" or not s.optimizer.distributed:
        yield "memory.offload_optimizer needs optimizer.type adamw with optimizer.distributed true"
    if s.precision.dtype != "bfloat16":
        yield "memory.offload_optimizer needs precision.dtype bfloat16: Megatron cannot resume others"
    if s.precision.fp8 is not None and s.precision.fp8.parameters:
        yield "memory.offload_optimizer excludes precision.fp8.parameters; remove one of them"


def _transformer_engine_problems(s: Sections) -> Iterator[str]:
    fp8, implementation = s.precision.fp8, s.model.implementation
    if s.device == "cpu" and fp8 is not None and fp8.parameters:
        yield "precision.fp8.parameters needs device cuda: a CPU only emulates products; set it to false"
    if s.device == "cpu" and implementation == "transformer_engine":
        yield "model.implementation transformer_engine needs device cuda; use auto or local"
    if s.precision.dtype == "float32" and implementation == "transformer_engine":
        yield (
            "model.implementation transformer_engine needs precision.dtype bfloat16: its attention does "
            "not support float32; use auto or local"
        )
    if s.device == "cuda" and fp8 is not None and implementation == "local":
        yield "precision.fp8 needs Transformer Engine's layers; set model.implementation to auto"
    if fp8 is not None and fp8.parameters and not s.optimizer.distributed:
        yield "precision.fp8.parameters needs optimizer.distributed: it keeps the float32 master weights"
    if fp8 is not None and fp8.parameters and s.anchor.type != "old":
        yield (
            f"precision.fp8.parameters excludes anchor.type {s.anchor.type}, whose weights are "
            "swapped in; set precision.fp8.parameters to false or anchor.type to old"
        )

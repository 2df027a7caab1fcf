"""Settings of rollouts and engines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from inspect import isfunction
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from rpg_megatron.config import filters
from rpg_megatron.config.base import IMPORT_PATH, Affects, ImportedSettings, Section, built_in_or_imported


class DynamicSamplingSettings(Section, affects="training"):
    """Dynamic sampling (DAPO): keep only groups with correct and wrong responses; sample until a step is
    full.
    """

    type: str = "mixed"
    """Which groups to keep. mixed: those with correct and wrong responses. Or the import path module:function
    of your own function(scores), which returns whether to keep a group; its settings are the other keys;
    docs/extend.md."""
    rounds: int = Field(20, ge=1)
    """Maximum number of graded groups for one step, as a multiple of ``prompts_per_step`` x ``oversample``;
    the run stops if the step is still not full."""
    oversample: float = Field(1.0, ge=1)
    """Groups that are sampled or kept at a time, as a multiple of ``prompts_per_step``, so that rejected
    groups cost less time. Groups beyond the batch are discarded, and their prompts come again in the next
    step. 1: each rejected group is replaced when it is graded."""

    @field_validator("type")
    @classmethod
    def _check_filter(cls, value: str) -> str:
        built_in = [name for name, member in vars(filters).items() if isfunction(member) and name[0] != "_"]
        if value not in built_in and not re.fullmatch(IMPORT_PATH, value):
            raise ValueError(f"must be {' or '.join(built_in)}, or an import path module:function")
        return value

    def most_groups(self, prompts_per_step: int) -> int:
        """Maximum number of graded groups for one step."""
        return self.rounds * math.ceil(prompts_per_step * self.oversample)

    @property
    def path(self) -> str:
        """Import path of the filter, built-in or your own."""
        return self.type if ":" in self.type else f"{filters.__name__}:{self.type}"


if TYPE_CHECKING:
    AnyDynamicSamplingSettings = DynamicSamplingSettings
else:
    AnyDynamicSamplingSettings = built_in_or_imported(DynamicSamplingSettings)


class EpisodeSettings(ImportedSettings, affects="training", evaluated=True):
    """An episode of your own, by import path. The other keys are its settings; docs/environments.md."""

    workers: Annotated[int, Affects("speed", evaluated=True)] = Field(1, ge=1, le=10_000)
    """Number of processes that run episodes, many at a time in each; at least one for each of
    rollout.workers."""
    deadline: float = Field(300.0, gt=0)
    """Time limit for what an episode does besides its turns, in total, in seconds; then it is ended and has
    failed. Waiting for a turn or for the reward takes none of it."""
    max_turns: int = Field(1000, ge=1)
    """Most turns of a response; then it counts as truncated."""
    failed: float = Field(0.0, allow_inf_nan=False)
    """Reward of a response whose episode raised, was ended at its deadline or crashed; if episodes return
    numbers, also of one that a limit of tokens or turns has ended without a number."""
    weight: float | None = Field(None, allow_inf_nan=False)
    """Factor of the episode's reward, which is then added to the run's reward; null: an episode's reward
    replaces it."""


class RolloutSettings(Section, affects="training"):
    """What the engines sample for one step."""

    prompts_per_step: int = Field(512, ge=1)
    """Prompts per step."""
    samples_per_prompt: int = Field(16, ge=1)
    """Responses per prompt: the group that advantages are computed over."""
    max_response_tokens: Annotated[int, Affects("training", evaluated=True)] = Field(2048, ge=1)
    """Maximum tokens of a response; a longer one is truncated."""
    episode: EpisodeSettings | None = None
    """Import path module:function of your own episode, such as a conversation with an environment; or a
    section with it as ``type``; docs/environments.md. null: one answer."""
    tool_call_parser: Annotated[str | None, Affects("training", evaluated=True)] = None
    """With ``episode``: vLLM's parser of tool calls (its --tool-call-parser, such as hermes or llama3_json),
    for clients of the gateway that offer tools; null: calls are left in the text; docs/environments.md."""
    dynamic: AnyDynamicSamplingSettings | None = None
    """Dynamic sampling; null: train on every group."""
    temperature: float = Field(1.0, ge=0.01, le=2)
    """Sampling temperature; the trainer applies it to its log-probs too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens whose probabilities sum to this; 1: all tokens.
    The trained policy is still the full distribution, so this and top_k need ``correction``."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many of the most likely tokens; null: all tokens."""
    stop: Annotated[tuple[str, ...], Affects("training", evaluated=True)] = ()
    """Strings that end a response, also in evaluations; they are kept in the response. For special tokens
    use stop_token_ids."""
    stop_token_ids: Annotated[tuple[int, ...], Affects("training", evaluated=True)] = ()
    """Token ids that end a response, besides the end-of-sequence tokens and, with chats, the end of a turn in
    the chat template; also in evaluations. sft: the first ends turns for which the template has no end."""
    ahead: int = Field(0, ge=0)
    """Asynchronous rollouts: number of steps that the engines may sample ahead of the trainer, so that
    neither waits for the other. A token is sampled by weights at most this many updates old. 0: synchronous;
    1 or more needs ``correction``."""
    inflight: Literal["continue", "drain"] = "continue"
    """With ``ahead``: what happens to unfinished responses at a weight update. continue: the engines continue
    them with the new weights, so a response may have tokens of several versions. drain: all groups that have
    started are finished first, so each batch has one version (``ahead`` 1 only)."""
    workers: Annotated[int, Affects("speed", evaluated=True)] = Field(1, ge=1, le=10_000)
    """Number of processes that send requests to the engines, detokenise and grade; 1: the sampler process
    does it. The batch does not depend on it. Increase it if many responses end at once: one process handles
    about 350 responses of 8,192 tokens per second."""
    journal_routes: Annotated[
        Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=1)], ...], Affects("files")
    ] = 0
    """With training.router_replay: steps whose files in rollouts/ include the routes, which the command
    replay needs: a list of steps, or n for every n-th step; 0: none. Before compression a token takes layers
    x experts per token bytes: 384 for a model with 48 layers and 8 experts per token."""

    @field_validator("episode", mode="before")
    @classmethod
    def _parse_path(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def restricted(self) -> str:
        """Name of the first setting that restricts sampling to a part of the distribution; empty: none."""
        return "top_p" if self.top_p < 1 else "top_k" if self.top_k is not None else ""

    @property
    def interrupted(self) -> bool:
        """Whether requests may be running when weights are updated."""
        return self.ahead > 0 or (self.dynamic is not None and self.dynamic.oversample > 1)

    @property
    def probed(self) -> bool:
        """Whether the mismatch guard needs probes, because tokens of the batch are not enough."""
        return self.ahead > 0 or bool(self.restricted)

    @property
    def log_prob_excess(self) -> float:
        """How far an engine's log-prob may exceed the trainer's, in nats.

        The engine's probability is relative to the kept tokens, whose total is at least top_p, or unknown
        with top_k.
        """
        if self.top_k is not None:
            return math.inf
        return -math.log(self.top_p)

    def _problems(self) -> Iterator[str]:
        if any(not text for text in self.stop):
            yield "stop: a string is empty; remove it"
        if self.stop and self.ahead and self.inflight == "continue":
            yield (
                "stop needs inflight drain with ahead: after a weight update an engine would not see the "
                "part of a string that was sampled before it; set inflight to drain, or use stop_token_ids"
            )
        if self.tool_call_parser and self.episode is None:
            yield "tool_call_parser needs an episode, whose clients offer tools; remove it"
        if self.dynamic is not None and self.samples_per_prompt == 1:
            yield "dynamic needs samples_per_prompt of 2 or more: a group of one is never mixed"
        if self.inflight == "drain" and self.ahead != 1:
            yield (
                f"inflight drain needs ahead 1 (it is {self.ahead}): groups that have started are finished "
                "before new weights are loaded, so no batch is older than one update"
            )
        if self.ahead and self.dynamic is not None and self.dynamic.oversample != 1:
            yield (
                "ahead excludes dynamic.oversample: groups beyond the limit would be more than ahead updates "
                "old when they are trained on; remove it, and raise ahead if the trainer waits"
            )


_WITHOUT_ROUTES = {
    frozenset({"--pipeline-parallel-size", "-pp"}): "from pipeline stages",
    frozenset({"--kv-transfer-config", "--kv-offloading-size"}): "with a KV connector",
    frozenset(
        {"--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"}
    ): "with context parallelism",
    frozenset({"--no-enable-return-routed-experts"}): "with it",
}
"""Arguments with which vLLM returns no routes (--enable-return-routed-experts) -> reason, for the message."""


class EngineSettings(Section, affects="speed", evaluated=True):
    """vLLM rollout engines."""

    replicas: int = Field(1, ge=0, le=10_000)
    """Number of engines; prompts are distributed over them. With sft and no evaluation: always 0."""
    tensor: int = Field(1, ge=1)
    """Tensor-parallel size of one engine; independent of the trainer's. More than the GPUs of a node: see
    ``cluster.engine_nodes``."""
    max_sequences: int | None = Field(None, ge=1)
    """Maximum sequences that an engine decodes concurrently (vLLM's max_num_seqs). null: on a GPU what its
    memory holds, which plan prints, and no more than a step has or 1024; else 256. docs/plan.md."""
    colocated: bool = False
    """Engines and trainer share the same GPUs and take turns: on each node, worker i uses the GPU of trainer
    rank i. During training, the engines are in vLLM's sleep mode, without weights and KV cache; during
    sampling, the optimizer state is in host memory. On a CPU they also take turns, but vLLM frees no
    memory."""
    kv_cache_gib: float = Field(1.0, gt=0, le=1e6)
    """KV cache of one worker, in GiB, on a CPU or when colocated. Otherwise vLLM uses the free memory of its
    GPU."""
    cpu_threads: int | None = Field(None, ge=1)
    """Compute threads of one worker on a CPU; null: the machine's cores divided by the number of workers.
    With ``rollout.ahead``, when engines and trainer compute at the same time: half of the cores, and the
    trainer's ranks have those that are left."""
    quantization: Annotated[Literal["fp8"] | None, Affects("results", evaluated=True)] = None
    """fp8: the engine quantises the weights at every sync and computes in FP8. Faster sampling, but a larger
    mismatch between engine and trainer: watch mismatch/*; see guards and correction."""
    start_timeout: float = Field(600.0, gt=0)
    """Time limit for the start of an engine, in seconds."""
    request_timeout: float = Field(1800.0, gt=0)
    """Time limit for a request, in seconds; then the engine is considered hung."""
    health_timeout: float = Field(120.0, gt=0)
    """Time limit without progress, in seconds; then the engine is considered hung and is restarted. Progress
    is an answer of the engine core, which it gives between two steps; during a weight update, slices loaded;
    on a CPU, layers computed. Set it above the duration of the longest step."""
    restarts: int = Field(3, ge=0)
    """Maximum restarts of each engine when it dies, hangs or fails in a weight sync; 0: the first failure
    ends the run."""
    arguments: Annotated[tuple[str, ...], Affects("results", evaluated=True)] = ()
    """Additional vLLM server arguments, passed unchanged."""

    @property
    def most_sequences(self) -> int:
        """``max_sequences``, with its default."""
        return self.max_sequences or 256

    def problems_of_routes(self) -> Iterator[str]:
        """Conflicts of ``arguments`` with training.router_replay: the engine would return no routes."""
        names = [argument.partition("=")[0] for argument in self.arguments]
        for excluded, why in _WITHOUT_ROUTES.items():
            for name in excluded.intersection(names):
                yield (
                    f"engine.arguments: {name} excludes training.router_replay: vLLM returns no routes "
                    f"{why}; remove it, or set training.router_replay to off"
                )


BUCKET_BYTES = 256 * 1024**2
"""Transport process_group: buffer for messages in flight at each engine worker."""
LINK_SECONDS = 120.0
"""Transport process_group: time limit for one message."""


class BridgeSettings(Section, affects="speed"):
    """Weight sync from trainer ranks to engines."""

    transport: Literal["shared_memory", "cuda_ipc", "process_group"] = "shared_memory"
    """The default with device cuda is cuda_ipc.
    shared_memory: engines on the trainers' node read the weights from /dev/shm (with GPUs: a copy).
    cuda_ipc: engines read the trainers' GPU memory. process_group: trainers send to engines on any
    node, over NCCL between GPUs and gloo on a CPU; to colocated engines over gloo, through host memory. With
    several nodes, the first two need colocated engines, and the ranks of each node must hold the whole model.
    """


class ExportSettings(Section, affects="files"):
    """Hugging Face checkpoint written at the end."""

    enabled: bool = True
    """Write <run>/hf/step_NNNNNN when training ends."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the exported weights; null: precision.dtype."""


class KeepBestSettings(Section, affects="files"):
    """Keeps the best checkpoints by a metric of the evaluation. If a step is among the best, it is saved
    even if ``checkpoint.every`` is not due.
    """

    metric: str | None = None
    """Key of the metric, such as eval/heldout/avg@1; null: avg@k of the first held-out set."""
    k: int = Field(1, ge=1)
    """Number of best checkpoints to keep, besides ``checkpoint.keep`` and ``milestone``."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better. With equal values, the earlier step is better."""


_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([kMGT]?)(i?)B")


class RolloutFilesSettings(Section, affects="files"):
    """The saved rollouts of each step: <run>/rollouts/step_NNNNNN."""

    keep: int | str | None = None
    """Rollouts to keep: a number of newest steps, or a size such as 50GB or 100GiB; null: all. Older ones are
    removed when a checkpoint is complete, and only those of its step and before."""

    @field_validator("keep", mode="before")
    @classmethod
    def _check_keep(cls, value: Any) -> Any:
        steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (value is None or steps or (isinstance(value, str) and _SIZE.fullmatch(value.strip()))):
            raise ValueError("must be a number of steps of at least 1, or a size such as 50GB or 100GiB")
        return value

    @property
    def keep_bytes(self) -> int | None:
        """Bytes to keep; None if ``keep`` is a number of steps, or null."""
        if not isinstance(self.keep, str):
            return None
        match = _SIZE.fullmatch(self.keep.strip())
        assert match is not None
        return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


class CheckpointSettings(Section, affects="files"):
    """Training checkpoints, to resume from: <run>/checkpoints/step_NNNNNN."""

    every: int | None = Field(50, ge=1)
    """Steps between checkpoints; another one is written after the last step. null: no checkpoints."""
    minutes: float | None = Field(None, gt=0)
    """Also write one after the first step that ends this long after the last one; null: by steps only. In a
    Slurm job, one is also written after a step whose successor may not end before the job's warning."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    milestone: int | None = Field(None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this; null: none."""
    keep_best: KeepBestSettings | None = None
    """Also keep the best checkpoints by a metric of the evaluation; null: none. They are listed in
    checkpoints/best.json."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory, while training continues. false: training waits,
    and no copy is made."""
    grace: float = Field(600.0, gt=0)
    """Time limit for saving and exiting after SIGTERM or SIGUSR1, in seconds; then the run is killed."""

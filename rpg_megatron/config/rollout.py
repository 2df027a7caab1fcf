"""Settings of rewards, rollouts and engines."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rpg_megatron.config.base import Section

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class OverlongSettings(Section):
    """DAPO's soft penalty on long responses: 0 until ``buffer`` tokens are left, then linear to -factor."""

    buffer: int = Field(512, ge=1)
    """Tokens before rollout.max_response_tokens over which the penalty grows."""
    factor: float = Field(1.0, gt=0)
    """Penalty of a response that is cut."""


BUILT_IN_REWARDS = ("answer_line", "boxed", "gsm8k", "auto")
"""Values of reward.type that are no import path; ``rewards/extraction`` says where each finds the answer."""


class RewardSettings(Section):
    """How a response is scored: the sum of correctness, overlong and format."""

    type: str = "answer_line"
    """Where the answer stands: answer_line (the last "Answer: ..." in the last 300 characters), boxed (the
    last \\boxed{}), gsm8k (after ####), or auto (whichever comes last). It is compared as number or text,
    then by math-verify. Or the import path module:function of your own: function(response, answer) returns
    whether the response is right, or its reward (right if above 0).
    """
    correct: float = 1.0
    """Reward of a right response."""
    wrong: float = -1.0
    """Reward of a wrong one."""
    overlong: OverlongSettings | None = None
    """Penalty on long responses; null for none."""
    format: float = Field(0.0, le=0)
    """Added where the response holds no answer in the form of ``type``."""
    workers: int = Field(2, ge=1)
    """Processes that verify answers which are not plain numbers."""
    deadline: float = Field(5.0, gt=0)
    """Seconds that one answer may take; then its process is killed and it counts as wrong."""
    memory_gib: float = Field(2.0, gt=0)
    """Address space of one such process, in GiB; an answer that needs more counts as wrong."""

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in BUILT_IN_REWARDS and not _IMPORT_PATH.fullmatch(value):
            raise ValueError(
                f"must be one of {', '.join(BUILT_IN_REWARDS)}, or an import path module:function"
            )
        return value

    @model_validator(mode="after")
    def _has_an_effect(self) -> RewardSettings:
        if self.format and self.type not in BUILT_IN_REWARDS:
            raise ValueError(
                f"format has no effect on {self.type}, which sees to the format itself; remove it"
            )
        return self


class DynamicSamplingSettings(Section):
    """Train on groups with right and wrong responses alone (DAPO): draw prompts until a step is full."""

    rounds: int = Field(20, ge=1)
    """The run stops if a step is not full after so many rounds."""
    oversample: float = Field(1.0, ge=1)
    """Prompts drawn in a round, relative to the groups that are missing."""
    surplus: Literal["keep", "drop"] = "keep"
    """Groups that are over. keep: the next step begins with them, though weights before its own sampled them;
    drop: every step is sampled by its own weights alone, as in the scripts of arXiv 2505.17508."""


class RolloutSettings(Section):
    """What the engines sample in a step."""

    prompts_per_step: int = Field(512, ge=1)
    """Prompts in a step."""
    samples_per_prompt: int = Field(16, ge=1)
    """Responses to each prompt; the group that the advantage is taken over."""
    max_response_tokens: int = Field(2048, ge=1)
    """A response is cut here and counts as truncated."""
    dynamic: DynamicSamplingSettings | None = None
    """Dynamic sampling; null takes every group."""
    temperature: float = Field(1.0, ge=0.01, le=2)
    """Sampling temperature; the trainer's log-probs use the same."""

    @model_validator(mode="after")
    def _groups_can_be_mixed(self) -> RolloutSettings:
        if self.dynamic is not None and self.samples_per_prompt == 1:
            raise ValueError(
                "dynamic needs samples_per_prompt of 2 or more: one response is all right or wrong"
            )
        return self


class EngineSettings(Section):
    """The vLLM servers that produce rollouts."""

    replicas: int = Field(1, ge=1)
    """Number of engines; prompts are spread over them."""
    tensor: int = Field(1, ge=1)
    """Tensor-parallel workers of one engine; need not equal the trainer's."""
    max_sequences: int = Field(256, ge=1)
    """Sequences an engine decodes at once."""
    colocated: bool = False
    """Engines and trainer take turns on the same GPUs: on each node worker i has that of the node's trainer
    rank i. While the trainer works the engines sleep, without weights and KV cache; while they sample, its
    optimizer state waits in host memory. On a CPU they take the same turns, but vLLM gives no memory back.
    """
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache of one worker on a CPU, or of one that is colocated, in GiB. Elsewhere vLLM takes what is left
    of its GPU."""
    cpu_threads: int | None = Field(None, ge=1)
    """Compute threads of one worker on a CPU; null: the machine's cores shared out over all workers."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine's weights and products are FP8, made from the trainers' weights at every sync. Samples
    faster, from a policy that differs by more than rounding: watch mismatch/*, see guards and correction."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds an engine may take until it answers."""
    request_timeout: float = Field(1800.0, gt=0)
    """Seconds a request may take before the engine counts as hung."""
    health_timeout: float = Field(120.0, gt=0)
    """Seconds an engine may be silent, when asked whether it lives, before it counts as hung."""
    restarts: int = Field(3, ge=0)
    """How often each engine is restarted in a run when it dies, hangs or fails to take weights; 0: the first
    time ends the run.
    """
    arguments: tuple[str, ...] = ()
    """Further vLLM server arguments, passed on unchanged."""


class BridgeSettings(Section):
    """How weights get from the trainers into the engines."""

    transport: Literal["shared_memory", "cuda_ipc", "process_group"] = "shared_memory"
    """shared_memory: engines on the trainers' node read files in shared memory (where the trainers are on
    GPUs, copies of their weights). cuda_ipc: they read the trainers' GPU memory. process_group: trainers
    send, over gloo on a CPU and NCCL on GPUs, to engines wherever they are; to colocated ones always over
    gloo, through host memory. The first two reach over several nodes where engines are colocated and the
    ranks of each node hold the whole model.
    """
    address: str | None = None
    """process_group: host name or IP of the first node under which engines reach the trainers; null: its
    address in the cluster, on one node the loopback's."""
    timeout: float = Field(120.0, gt=0)
    """process_group: seconds that one message may take before the other end counts as dead."""
    bucket_mib: int = Field(256, ge=1)
    """process_group: memory for messages under way at each engine worker, in MiB."""


class ExportSettings(Section):
    """The Hugging Face checkpoint written at the end."""

    enabled: bool = True
    """Write hf/step_NNNNNN when training ends."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the exported weights; null: that of the policy."""
    max_shard_gib: float = Field(4.0, gt=0)
    """Largest safetensors file, in GiB."""


class CheckpointSettings(Section):
    """Checkpoints to continue training from: checkpoints/step_NNNNNN in the run's folder."""

    every: int | None = Field(50, ge=1)
    """Steps between checkpoints; one more is written after the last step. null: none at all."""
    keep: int = Field(2, ge=1)
    """So many are kept, the newest."""
    milestone: int | None = Field(None, ge=1)
    """Those at multiples of so many steps are kept for good; null: none are."""
    asynchronous: bool = True
    """Write in the background while training goes on, from a copy in host memory of what each rank writes.
    false: without the copy, and training waits.
    """
    grace: float = Field(600.0, gt=0)
    """Seconds to save and leave after SIGTERM or SIGUSR1; then the run is ended without."""

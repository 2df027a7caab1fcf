"""Settings of the policy: checkpoint, parallel layout, precision, memory, optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rpg_megatron.config.base import Affects, HubOrInputPath, InputPath, Section
from rpg_megatron.config.schedules import AnyScheduleSettings, ConstantSettings


def is_hub_id(path: Path | str) -> bool:
    """Whether a path has the form of a model's id on the Hugging Face hub: owner/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) is not None


class ModelSettings(Section, affects="training"):
    """The checkpoint that training starts from."""

    path: Annotated[HubOrInputPath, Affects("training", evaluated=True)]
    """Folder of a Hugging Face checkpoint (config.json, safetensors files, tokenizer), or of a Megatron
    checkpoint of convert hf-to-megatron, or the id of a model on the Hugging Face hub, such as
    Qwen/Qwen3-4B-Base: downloaded into the hub's cache."""
    adapter: InputPath | None = None
    """Folder of an adapter in PEFT's format (adapter_config.json, adapter_model.safetensors) to start from;
    needs lora, with its rank, alpha and targets. null: new adapters."""
    revision: Annotated[str | None, Affects("training", evaluated=True)] = None
    """Branch, tag or commit of a model on the hub; null: its main branch."""
    vocab_multiple: Annotated[int, Affects("sums")] = Field(1, ge=1)
    """Pad each tensor-parallel rank's vocabulary shard to a multiple of this many rows."""
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation (Megatron's transformer_impl). local: plain PyTorch layers. transformer_engine:
    fused norms, cuDNN attention, FP8; needs a GPU and bfloat16. auto: transformer_engine where possible, else
    local."""


class ParallelSettings(Section, affects="sums"):
    """Parallel layout of the policy: tensor x pipeline x context x data ranks."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel size (TP): splits the heads and MLP columns of each layer."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel size (PP): splits the layers into stages."""
    virtual: int = Field(1, ge=1)
    """Virtual stages of each pipeline rank (VPP), for the interleaved 1F1B schedule: a smaller pipeline
    bubble for more communication. Megatron's virtual_pipeline_model_parallel_size; 1: off."""
    context: int = Field(1, ge=1)
    """Context-parallel size (CP): splits each sequence into 2 x context chunks, two for each rank; attention
    gathers all keys and values. For sequences that do not fit in the memory of one rank."""
    data: int = Field(1, ge=1)
    """Data-parallel size (DP): replicas of the policy, which share each mini-batch."""
    sequence: bool = False
    """Sequence parallelism (SP): splits norms and residuals along the tokens over the TP ranks. Mixtures of
    experts need it with tensor of 2 or more."""
    expert: int = Field(1, ge=1)
    """Mixtures of experts: expert-parallel size (EP). The experts of each layer are split over this many of
    the tensor x context x data ranks of a stage, which exchange their tokens; it adds no ranks."""
    expert_tensor: int = Field(1, ge=1)
    """Mixtures of experts: tensor-parallel size of each expert (ETP), also over ranks of the stage;
    independent of parallel.tensor."""

    @property
    def world(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    def _problems(self) -> Iterator[str]:
        if self.virtual > 1 and self.pipeline == 1:
            yield f"virtual={self.virtual} needs pipeline of 2 or more; raise pipeline, or set virtual to 1"
        if self.world > 100_000:  # a plan looks at each of them
            yield f"tensor x pipeline x context x data is {self.world:,}; at most 100,000 ranks"
        ranks = self.tensor * self.context * self.data
        if ranks % (self.expert * self.expert_tensor):
            yield (
                f"expert={self.expert} x expert_tensor={self.expert_tensor} must divide the {ranks} ranks of "
                "a stage (tensor x context x data), over which the experts are split; lower it (to 1 for a "
                "model without experts), or raise data"
            )


class FP8Settings(Section, affects="training"):
    """FP8 matrix products in the transformer layers (Transformer Engine), in updates and in log-prob passes.

    Attention, norms, embedding and output layer stay in bfloat16. With device cpu FP8 is emulated: operands
    are rounded as the recipe says, products are float32.
    """

    recipe: Literal["blockwise", "tensorwise", "delayed"] = "blockwise"
    """Scaling recipe. blockwise: one scale for each 1 x 128 block of activations and 128 x 128 block of
    weights. tensorwise: one for each tensor, from its current maximum. delayed: one for each tensor, from its
    maxima in the last 1024 passes."""
    parameters: bool = False
    """Store the layers' weights in FP8, with float32 master weights in the optimizer. Engines receive the FP8
    weights, converted to bfloat16. Not with device cpu."""
    first_last_bf16: int = Field(0, ge=0)
    """Number of layers at the start, and at the end, that stay in bfloat16."""

    @property
    def multiple(self) -> int:
        """The tokens of a micro-batch and both dimensions of a weight, on a rank, must be multiples of this.

        Transformer Engine's kernels require it: 128 is the size of a block; 16 is enough for other recipes.
        """
        return 128 if self.recipe == "blockwise" else 16

    def _problems(self) -> Iterator[str]:
        if self.recipe == "delayed" and self.first_last_bf16:
            yield (
                "recipe delayed does not support layers in bfloat16; "
                "set first_last_bf16 to 0, or recipe to tensorwise or blockwise"
            )


class PrecisionSettings(Section, affects="training"):
    """Precision of the policy."""

    dtype: Annotated[Literal["float32", "bfloat16"], Affects("training", evaluated=True)] = "bfloat16"
    """Weights and activations in trainer and engine. Gradients and optimizer state are float32."""
    fp8: FP8Settings | None = None
    """FP8 in the trainer, on Hopper GPUs, or emulated on a CPU; null: off."""

    def token_multiple(self, parallel: ParallelSettings) -> int:
        """Multiple that the positions of a micro-batch on each context rank are padded to.

        Sequence parallelism splits them over the tensor-parallel ranks, and FP8 needs a multiple on each.
        """
        return (parallel.tensor if parallel.sequence else 1) * (self.fp8.multiple if self.fp8 else 1)

    def _problems(self) -> Iterator[str]:
        if self.fp8 is not None and self.dtype != "bfloat16":
            yield f"fp8 needs dtype bfloat16, not {self.dtype}; change one of the two"


class MemorySettings(Section, affects="speed"):
    """Activation recomputation and offload."""

    recompute: Literal["none", "selective", "full"] | None = None
    """Activations that the backward pass recomputes. none; selective: the MLPs, or routers and experts; full:
    whole layers, of which only the input is stored. null: chosen by the tokens of a rank's largest
    micro-batch (a full one, or the longest sequence over parallel.context): none up to 4096, selective up to
    8192, full above."""
    offload_optimizer: Annotated[float, Affects("sums")] = Field(0.0, ge=0, le=1)
    """Fraction of the optimizer state (float32 weights and moments) in host memory, updated by the CPU. Saves
    12 bytes of GPU memory per parameter, divided over the data-parallel ranks; updates are slower. Needs
    device cuda, bfloat16 and the distributed AdamW."""

    def recompute_for(self, tokens: int) -> Literal["none", "selective", "full"]:
        """The recomputation in micro-batches of ``tokens`` tokens on a rank."""
        if self.recompute is not None:
            return self.recompute
        return "none" if tokens <= 4096 else "selective" if tokens <= 8192 else "full"


class OptimizerSettings(Section, affects="training"):
    """Megatron's AdamW, Schedule-Free AdamW, or Muon."""

    type: Literal["adamw", "schedule_free_adamw", "muon"] = "adamw"
    """schedule_free_adamw (arXiv 2405.15682): rollouts, log-probs and exports use the averaged weights.
    muon (arXiv 2502.16982): hidden matrices are updated by their orthogonalised momentum, embeddings, output
    layer, norms and biases by AdamW with the same lr."""
    lr: float = Field(1e-6, gt=0, le=1)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up, with every schedule. Step 1 uses lr / warmup_steps, not 0."""
    schedule: AnyScheduleSettings = ConstantSettings()
    """Learning rate after the warm-up, until training.steps. A run resumed with another training.steps
    follows the new curve from there."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: float = Field(1.0, ge=0)
    """Maximum global gradient norm; 0: no clipping."""
    distributed: bool = True
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    overlap: Annotated[bool, Affects("sums")] = True
    """With several data or context ranks: overlap the gradient reduction with the backward pass and, if
    distributed, the weight all-gather with the next forward pass. Results do not change."""

    def warnings(self, steps: int) -> Iterator[str]:
        """Of a run of ``steps`` steps: a warm-up that was set and ends after it."""
        if "warmup_steps" in self.model_fields_set and self.warmup_steps > steps:
            yield f"optimizer.warmup_steps ({self.warmup_steps}) exceeds the run's {steps} steps; lower it"

    def _problems(self) -> Iterator[str]:
        held = {
            "schedule_free_adamw": "Megatron cannot shard its averaged weights",
            "muon": "Megatron cannot resume its sharded momentum on other data ranks",
        }
        if self.distributed and self.type in held:
            yield f"{self.type} cannot be distributed: {held[self.type]}; set distributed to false"

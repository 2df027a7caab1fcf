"""Settings of the trained model: checkpoint, layout, precision, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rpg_megatron.config.base import InputPath, Section


class ModelSettings(Section):
    """The checkpoint that training starts from."""

    path: InputPath
    """Folder of a Hugging Face checkpoint: config.json, safetensors files, tokenizer."""
    vocab_multiple: int = Field(1, ge=1)
    """Each tensor-parallel rank's vocabulary shard is padded to a multiple of this many rows."""
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Whose layers the policy is made of. local: Megatron's own. transformer_engine: fused norms, cuDNN
    attention, FP8; GPUs and bfloat16 only. auto: transformer_engine where it can be used, else local."""


class ParallelSettings(Section):
    """How the policy is spread over processes: tensor x pipeline x context x data of them."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks (TP): each layer's heads and MLP columns are cut over them."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages (PP): the layers are cut over them."""
    virtual: int = Field(1, ge=1)
    """Virtual stages of each pipeline rank (VPP), for interleaved 1F1B: the layers are cut over pipeline x
    virtual stages, dealt out in turn. Less idling for more messages. Megatron's
    virtual_pipeline_model_parallel_size; 1: off."""
    context: int = Field(1, ge=1)
    """Context-parallel ranks (CP): every sequence is cut over them, in 2 x context chunks; each computes its
    chunks' share of a layer, and attention brings all keys and values together. For sequences that are too
    long for one rank's memory."""
    data: int = Field(1, ge=1)
    """Data-parallel replicas (DP): each takes a share of every mini-batch."""
    sequence: bool = False
    """Sequence parallelism (SP): norms and residuals are cut along the tokens over the TP ranks."""

    @property
    def world(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @model_validator(mode="after")
    def _virtual_stages_have_stages(self) -> ParallelSettings:
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual={self.virtual} interleaves pipeline stages and there is one; "
                "set pipeline to 2 or more, or virtual to 1"
            )
        return self


class FP8Settings(Section):
    """Matrix products of the layers in FP8 (Transformer Engine), in training and in log-prob passes alike.

    Attention, norms, embedding and output layer stay bfloat16. There is no loss scale to set. With device cpu
    it is emulated: operands are rounded as the recipe says, products are float32.
    """

    recipe: Literal["blockwise", "tensorwise", "delayed"] = "blockwise"
    """Where scales come from. blockwise: one for each 1 x 128 of activations and 128 x 128 of weights.
    tensorwise: one for each tensor, from its present values. delayed: one for each tensor, from its largest
    values of the last 1024 passes."""
    parameters: bool = False
    """Keep the layers' weights in FP8, beside the optimizer's float32 ones; what engines then get are these
    weights, in bfloat16. Not with device cpu."""
    first_last_bf16: int = Field(0, ge=0)
    """So many layers at the start, and as many at the end, stay in bfloat16."""

    @property
    def multiple(self) -> int:
        """Tokens of a micro-batch on a rank, and each side of a weight on a rank, are multiples of this.

        What the kernels of Transformer Engine ask for: 128 is the side of a block, 16 suits every product.
        """
        return 128 if self.recipe == "blockwise" else 16

    @model_validator(mode="after")
    def _delayed_scaling_is_for_all_layers(self) -> FP8Settings:
        if self.recipe == "delayed" and self.first_last_bf16:
            raise ValueError(
                "recipe delayed does not allow for layers in bfloat16; "
                "set first_last_bf16 to 0, or recipe to tensorwise or blockwise"
            )
        return self


class PrecisionSettings(Section):
    """Number formats of the policy."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and activations in the trainer and in the engine. Gradients and the optimizer stay float32."""
    fp8: FP8Settings | None = None
    """FP8 in the trainer, on Hopper GPUs, or emulated on a CPU; null for none."""

    @model_validator(mode="after")
    def _fp8_is_mixed_with_bfloat16(self) -> PrecisionSettings:
        if self.fp8 is not None and self.dtype != "bfloat16":
            raise ValueError(f"fp8 goes with dtype bfloat16, not {self.dtype}; change one of the two")
        return self


class MemorySettings(Section):
    """What is computed again rather than kept, or kept elsewhere."""

    recompute: Literal["none", "selective", "full"] | None = None
    """Activations that backward computes again: none; selective: MLPs; full: whole layers, of which only the
    input is kept. null: by the most tokens that a rank computes at once, those of a full micro-batch or of
    the longest sequence over parallel.context: none up to 4096, selective up to 8192, else full."""
    offload_optimizer: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer's state (float32 weights and moments) that is in host memory, where the CPU
    updates it: 12 bytes per parameter, over the data ranks, less on the GPU, and slower updates. With device
    cuda, bfloat16 and the distributed AdamW only."""

    def recompute_for(self, tokens: int) -> Literal["none", "selective", "full"]:
        """What is recomputed in micro-batches of so many tokens on a rank."""
        if self.recompute is not None:
            return self.recompute
        return "none" if tokens <= 4096 else "selective" if tokens <= 8192 else "full"


class OptimizerSettings(Section):
    """AdamW as Megatron runs it, or Schedule-Free AdamW."""

    type: Literal["adamw", "schedule_free_adamw"] = "adamw"
    """schedule_free_adamw (arXiv 2405.15682): everything but the gradient uses the averaged weights."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up; constant."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up. Step 1 runs at lr / warmup_steps, not at 0."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, of matrices only: not of norms and biases."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    distributed: bool = True
    """Cut optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = True
    """With several data or context ranks: reduce gradients while backward goes on and, if distributed, gather
    new weights while the next update's forward pass does. The numbers are the same."""

    @model_validator(mode="after")
    def _schedule_free_is_not_cut(self) -> OptimizerSettings:
        if self.type == "schedule_free_adamw" and self.distributed:
            raise ValueError(
                "schedule_free_adamw cannot be distributed, since Megatron cannot cut its averaged weights; "
                "set distributed to false"
            )
        return self

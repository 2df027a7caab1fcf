"""Checks that what a run does is supported with the model's kinds of layers. Imports no torch."""

from __future__ import annotations

import importlib.util

from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.config.model_shape import Scales


def check_layers(settings: Settings, shape: ModelShape) -> None:
    """Check the policy's layers. Raises UserError."""
    check_rows(settings, shape)
    mixed = shape.linear is not None and settings.precision.dtype != "float32"
    if mixed and not settings.optimizer.distributed:
        raise UserError(
            f"optimizer.distributed: false with {shape.family} models in {settings.precision.dtype}: "
            "Megatron cannot save the optimizer of their float32 parameters (rates and norms of linear "
            "attention); set it to true, or precision.dtype to float32"
        )
    other = shape.fused_rows or shape.post_norm or shape.is_part or shape.scales != Scales()
    if settings.lora is not None and (other or shape.gated_attention):
        raise UserError(
            f"lora: {shape.family} models in this form (one tensor for several projections, norms behind "
            "blocks, multipliers, gated or linear attention, or a vision tower beside the decoder) have no "
            "adapters here; remove lora"
        )


def check_rows(settings: Settings, shape: ModelShape) -> None:
    """Check that the layers of the policy, or of a teacher, support the run's rows, layout and device."""
    if shape.windows is not None:
        _check_windows(settings, shape)
    if shape.linear is not None:
        _check_linear(settings, shape)


def _check_windows(settings: Settings, shape: ModelShape) -> None:
    if settings.training.shared_from is not None:
        raise UserError(
            f"training.share_prompts: {shape.family} models have sliding windows, which would begin inside "
            "the shared prompts; set it to false"
        )
    if settings.parallel.context > 1 and settings.device == "cuda":
        raise UserError(
            "parallel.context: Transformer Engine's attention with context parallelism has no sliding "
            f"windows, and {shape.family} models have; set it to 1"
        )


def _check_linear(settings: Settings, shape: ModelShape) -> None:
    assert shape.linear is not None
    parallel = settings.parallel
    if settings.training.shared_from is not None:
        raise UserError(
            f"training.share_prompts: {shape.family} models have linear attention, whose state after a "
            "shared prompt would not reach its responses; set it to false"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise UserError(
            f"parallel.tensor: {parallel.tensor} with linear attention ({shape.family}) needs sequence "
            "parallelism, or each rank would train its norm on its own heads only; set parallel.sequence to "
            "true"
        )
    among = parallel.tensor * parallel.context
    for heads, name in ((shape.linear.key_heads, "key"), (shape.linear.value_heads, "value")):
        if heads % among:
            raise UserError(
                f"parallel: tensor {parallel.tensor} x context {parallel.context} does not divide the "
                f"{heads} {name} heads of linear attention (linear_num_{name}_heads in config.json); lower "
                "one"
            )


def check_delta_kernels(settings: Settings, shape: ModelShape) -> None:
    """Check that the kernels of linear attention are installed. Raises UserError."""
    if settings.device == "cuda" and shape.linear is not None and importlib.util.find_spec("fla") is None:
        raise UserError(
            f"python package flash-linear-attention is missing, which {shape.family} models need on a GPU; "
            "install requirements/gpu.txt in its own environment (README, On a cluster)"
        )

"""The mapping of a model, and the check that a model fits the parallel sizes.

Nothing here imports torch: preflight runs it on a login node.
"""

from __future__ import annotations

import math
from functools import lru_cache

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.models.decoder import DecoderMapping
from rpg_megatron.models.mapping import ModelMapping


@lru_cache(maxsize=32)
def mapping_for(shape: ModelShape) -> ModelMapping:
    """The mapping for a model."""
    return DecoderMapping(shape)


def check_layout(
    shape: ModelShape, tensor: int, pipeline: int, virtual: int = 1, *, expert_tensor: int | None = None
) -> None:
    """Raise one UserError that lists every conflict between the model's sizes and the parallel sizes.

    The number of layers need not be divisible by the number of stages: see ``ModelShape.stage_layers``.
    expert_tensor: tensor-parallel size of each expert; None: ``tensor``, as in engines.
    """
    problems: list[str] = []
    if min(tensor, pipeline, virtual) < 1:
        raise UserError(
            f"parallel sizes must be at least 1, got tensor={tensor}, pipeline={pipeline}, virtual={virtual}"
        )
    heads, groups = shape.num_heads, shape.num_kv_heads
    split = [(heads, "attention heads")]
    if shape.has_dense_layers:
        split.append((shape.ffn_hidden_size, "feed-forward columns"))
    if shape.experts is not None and expert_tensor is None:
        split.append((shape.experts.ffn_hidden_size, "feed-forward columns of an expert"))
    if shape.experts is not None and (shared := shape.experts.shared_ffn_hidden_size):
        split.append((shared, "feed-forward columns of the shared expert"))
    for count, dimension in split:
        if count % tensor:
            problems.append(f"tensor={tensor} does not divide the model's {count} {dimension}")
    if (
        shape.experts is not None
        and expert_tensor is not None
        and shape.experts.ffn_hidden_size % expert_tensor
    ):
        problems.append(
            f"expert_tensor={expert_tensor} does not divide the {shape.experts.ffn_hidden_size} feed-forward "
            "columns of an expert"
        )
    if groups % tensor and tensor % groups:
        problems.append(
            f"tensor={tensor} neither divides the model's {groups} key/value heads nor is a multiple of them"
        )
    if shape.wide_qk_norm and groups % tensor:
        problems.append(
            f"tensor={tensor} does not divide the model's {groups} key/value heads, whose norm is over all "
            "of them"
        )
    rows = ((2 if shape.gated_attention else 1) * heads + 2 * groups) * shape.head_dim
    if rows % tensor:
        problems.append(f"tensor={tensor} does not divide the model's {rows} query, key and value rows")
    if heads % groups:
        problems.append(f"{heads} attention heads do not form {groups} equal groups")
    if shape.num_layers < pipeline * virtual:
        stages = f"pipeline={pipeline}" + (f" x virtual={virtual}" if virtual > 1 else "")
        problems.append(f"the model has {shape.num_layers} layers, fewer than {stages}: each stage needs one")
    if problems:
        most = math.gcd(*(count for count, _ in split))
        fits = [
            n
            for n in range(1, most + 1)
            if most % n == rows % n == 0 and (groups % n == 0 or (n % groups == 0 and not shape.wide_qk_norm))
        ]
        sizes = ", ".join(map(str, fits))
        raise UserError("; ".join(problems) + f" (tensor parallel sizes that fit this model: {sizes})")


def check_experts(shape: ModelShape, parallel: ParallelSettings, *, device: str) -> None:
    """Raise one UserError that lists every conflict between the model's experts and the trainer's layout.

    device: cpu or cuda. ``check_layout`` checks that the size of an expert is divisible.
    """
    problems: list[str] = []
    expert, expert_tensor, tensor = parallel.expert, parallel.expert_tensor, parallel.tensor
    if shape.experts is None:
        problems += [
            f"{key}={size}: the model has no experts; set it to 1"
            for key, size in (("expert", expert), ("expert_tensor", expert_tensor))
            if size > 1
        ]
    else:
        if shape.experts.count % expert:
            problems.append(f"expert={expert} does not divide the model's {shape.experts.count} experts")
        if tensor > 1 and not parallel.sequence:
            problems.append(
                f"tensor={tensor} with experts needs sequence parallelism: without it each rank would send "
                "every token, which Megatron does not support; set sequence to true"
            )
        if bare := _ranks_without_experts(shape, parallel):
            problems.append(
                f"pipeline={parallel.pipeline}: all layers of pipeline rank {bare[0]} are dense; its "
                "optimizer state would have a different structure, and no checkpoint could be resumed; lower "
                "pipeline, or raise virtual"
            )
        if device == "cpu" and expert_tensor > 1 and (expert > 1 or tensor % expert_tensor):
            # The ranks of an expert would have different numbers of tokens, which gloo cannot gather.
            problems.append(
                f"expert_tensor={expert_tensor} on a CPU needs expert=1 and must divide tensor ({tensor}); "
                "set it to 1"
            )
    if problems:
        raise UserError("; ".join(problems))


def _ranks_without_experts(shape: ModelShape, parallel: ParallelSettings) -> list[int]:
    """Pipeline ranks without a layer with experts; empty if there are fewer layers than stages."""
    stages = parallel.pipeline * parallel.virtual
    if stages > shape.num_layers:
        return []
    has_experts, first = [False] * parallel.pipeline, 0
    for stage, count in enumerate(shape.stage_layers(stages)):
        has_experts[stage % parallel.pipeline] |= any(map(shape.has_experts, range(first, first + count)))
        first += count
    return [rank for rank, value in enumerate(has_experts) if not value]

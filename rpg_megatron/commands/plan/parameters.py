"""Number of parameters of a trainer rank, from the mappings that checkpoints and bridge use."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from rpg_megatron.commands.plan.experts import expert_shard, is_expert
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.models.partition import ExpertShard
from rpg_megatron.models.registry import mapping_for


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank, over all of its virtual stages."""

    total: int
    in_experts: int
    """Of ``total``, those of experts."""
    largest: int
    """The largest single parameter."""


def rank_parameters(
    shape: ModelShape, parallel: ParallelSettings, stage: int, vocab_multiple: int
) -> RankParameters:
    """Count the parameters of a pipeline rank.

    One layer of each kind is counted: a large mixture of experts has tens of thousands of tensors.
    """
    layers = [n for part in layers_of(shape, parallel, stage) for n in part]
    how = parallel.tensor, vocab_multiple, expert_shard(shape, parallel)
    first, last = stage == 0, stage == parallel.pipeline - 1
    parts = [_count(shape, None, first, last, *how)]
    for experts, number in Counter(shape.has_experts(n) for n in layers).items():
        example = next(n for n in layers if shape.has_experts(n) == experts)
        one = _count(shape, example, False, False, *how)
        parts.append(RankParameters(number * one.total, number * one.in_experts, one.largest))
    return RankParameters(
        sum(p.total for p in parts), sum(p.in_experts for p in parts), max(p.largest for p in parts)
    )


@lru_cache(maxsize=512)
def _count(
    shape: ModelShape,
    layer: int | None,
    first: bool,
    last: bool,
    tensor: int,
    vocab_multiple: int,
    experts: ExpertShard,
) -> RankParameters:
    """Parameters of one layer; layer None: of the embedding and the modules after the layers."""
    found = mapping_for(shape).stage_params(
        layers=[] if layer is None else [layer],
        first=first,
        last=last,
        tensor=tensor,
        vocab_multiple=vocab_multiple,
        experts=experts,
    )
    sizes = {name: math.prod(dims) for name, dims in found.items()}
    in_experts = sum(size for name, size in sizes.items() if is_expert(name))
    return RankParameters(sum(sizes.values()), in_experts, max(sizes.values(), default=0))


def rank_sizes(shape: ModelShape, settings: Settings, stage: int) -> dict[str, int]:
    """Name and number of elements of every parameter of a pipeline rank."""
    parallel = settings.parallel
    found: dict[str, int] = {}
    for virtual, layers in enumerate(layers_of(shape, parallel, stage)):
        number = virtual * parallel.pipeline + stage
        params = mapping_for(shape).stage_params(
            layers=layers,
            first=number == 0,
            last=number == parallel.pipeline * parallel.virtual - 1,
            tensor=parallel.tensor,
            vocab_multiple=settings.model.vocab_multiple,
            experts=expert_shard(shape, parallel),
        )
        found |= {name: math.prod(dims) for name, dims in params.items()}
    return found


def layers_of(shape: ModelShape, parallel: ParallelSettings, stage: int) -> list[range]:
    """Layer indices of a pipeline rank, for each of its virtual stages."""
    counts = shape.stage_layers(parallel.pipeline * parallel.virtual)
    numbers = range(stage, len(counts), parallel.pipeline)
    return [range(sum(counts[:n]), sum(counts[: n + 1])) for n in numbers]

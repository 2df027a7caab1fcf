"""How the settings divide the model's layers, a step's batch and the GPUs among ranks and engines."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.policy import FP8Settings, ParallelSettings
from rpg_megatron.data.packing import padded_length, sequence_multiple
from rpg_megatron.launcher.nodes import assign_node, refuse_idle_gpus
from rpg_megatron.models.lora import AdapterMapping, projection_shape
from rpg_megatron.models.partition import ALL_EXPERTS, ExpertShard, RankCoordinates
from rpg_megatron.models.registry import mapping_for

_FP8_MATRICES = "linear_qkv", "linear_proj", ".in_proj", ".out_proj", "linear_fc1", "linear_fc2"
"""The parameters of a layer that FP8 recipes quantise."""


def layers_of(shape: ModelShape, parallel: ParallelSettings, stage: int) -> list[int]:
    """Layer indices of a pipeline rank, those of all of its virtual stages."""
    counts = shape.stage_layers(parallel.pipeline * parallel.virtual)
    numbers = range(stage, len(counts), parallel.pipeline)
    return [layer for n in numbers for layer in range(sum(counts[:n]), sum(counts[: n + 1]))]


def in_fp8(fp8: FP8Settings | None, layer: int, layers: int) -> bool:
    """Whether a layer (index from 0, of ``layers``) computes in FP8."""
    return fp8 is not None and fp8.first_last_bf16 <= layer < layers - fp8.first_last_bf16


def expert_replicas(parallel: ParallelSettings) -> int:
    """Ranks that hold the same experts, over which their optimizer state is sharded."""
    ranks = parallel.tensor * parallel.context * parallel.data
    return ranks // (parallel.expert * parallel.expert_tensor)


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters of a pipeline rank, over all of its virtual stages.

    Of ``total``, those of experts (without routers), of matrices in layers that compute in FP8, those that
    updates change (all, or those of adapters), those of matrices with adapters, and those of the layers'
    matrices, which Muon updates; orthogonalised: FLOPs of that, for whole matrices whatever the tensor ranks.
    """

    total: int
    in_experts: int
    in_fp8: int
    trained: int
    adapted: int = 0
    hidden: int = 0
    orthogonalised: int = 0

    def replicated(self, parallel: ParallelSettings) -> list[tuple[int, int]]:
        """Trained parameters outside and inside experts, with the number of ranks that hold the same ones."""
        in_experts = self.in_experts if self.trained == self.total else 0
        outside = self.trained - in_experts, parallel.data * parallel.context
        return [outside, (in_experts, expert_replicas(parallel))]

    def owned(self, settings: Settings) -> float:
        """Parameters whose optimizer state is on this rank."""
        distributed, groups = settings.optimizer.distributed, self.replicated(settings.parallel)
        return sum(number / (ranks if distributed else 1) for number, ranks in groups)


def rank_parameters(settings: Settings, shape: ModelShape, stage: int) -> RankParameters:
    """Count the parameters of a pipeline rank, from the mappings that checkpoints and bridge use.

    One layer of each kind is counted: a large mixture of experts has tens of thousands of tensors.
    """
    parallel, fp8, lora = settings.parallel, settings.precision.fp8, settings.lora
    # All expert-parallel ranks have shards of the same size.
    shard = ExpertShard(parallel.expert, 0, parallel.expert_tensor, 0) if shape.experts else ALL_EXPERTS
    at = RankCoordinates(tensor=parallel.tensor, vocab_multiple=settings.model.vocab_multiple, experts=shard)
    whole = replace(at, tensor=1, experts=replace(shard, tensor=1))
    sums = Counter(_count(shape, lora, None, (stage == 0, stage == parallel.pipeline - 1), at))
    layers = layers_of(shape, parallel, stage)
    examples = {(shape.has_experts(n), shape.is_linear(n)): n for n in layers}
    for n in layers:
        example = examples[shape.has_experts(n), shape.is_linear(n)]
        in_layer = _count(shape, lora, example, (False, False), at)
        sums.update(in_layer)
        sums["in_fp8"] -= 0 if in_fp8(fp8, n, shape.num_layers) else in_layer["in_fp8"]
        sums["flops"] += _count(shape, None, example, (False, False), whole)["orthogonalised"]
    trained = sums["total"] if lora is None else sums["adapters"]
    total = sums["total"] + sums["adapters"]
    of_muon = sums["hidden"], sums["flops"]
    return RankParameters(total, sums["in_experts"], sums["in_fp8"], trained, sums["adapted"], *of_muon)


@lru_cache(maxsize=512)
def _count(
    shape: ModelShape,
    lora: LoraSettings | None,
    layer: int | None,
    ends: tuple[bool, bool],
    at: RankCoordinates,
) -> dict[str, int]:
    """Parameters of a layer: all but adapters, those of experts, of matrices in FP8 recipes, of all matrices,
    of adapters, and of matrices that have adapters. FLOPs of five Newton-Schulz steps of each matrix.

    layer None: those of the embedding (``ends[0]``) and of the modules after the layers (``ends[1]``).
    """
    layers = [] if layer is None else [layer]
    shapes = mapping_for(shape).stage_params(at, layers=layers, first=ends[0], last=ends[1])
    sizes = {name: math.prod(dims) for name, dims in shapes.items()}
    counts = {
        "total": sum(sizes.values()),
        "in_experts": sum(size for name, size in sizes.items() if ".experts." in name),
        "in_fp8": sum(
            size for name, size in sizes.items() if name.removesuffix(".weight").endswith(_FP8_MATRICES)
        ),
    }
    matrices = [sorted(dims) for dims in shapes.values() if len(dims) == 2 and layer is not None]
    counts["hidden"] = sum(map(math.prod, matrices))
    counts["orthogonalised"] = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in matrices)
    if lora is not None:
        mapping = AdapterMapping(shape, lora)
        adapters = mapping.stage_params(at, layers=layers, first=ends[0], last=ends[1])
        counts["adapters"] = sum(map(math.prod, adapters.values()))
        rows = shape.padded_vocab(at.tensor, at.vocab_multiple) // at.tensor
        names = [] if layer is None else [t for each in mapping.packed(layer).values() for t in each]
        counts["adapted"] = sum(math.prod(projection_shape(shape, name)) for name in names) // at.tensor
        counts["adapted"] += mapping.on_output_layer * ends[1] * rows * shape.hidden_size
    return counts


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of a step. Tokens are upper bounds: all responses have the maximum length.

    sequences: responses per step; updates: minibatches x ppo_epochs; sequences_per_rank: of one mini-batch on
    the replica with the most; longest: tokens of prompt and response; context: also of evaluations;
    tokens_per_microbatch: of a replica's largest one, the budget or one longest sequence that is larger;
    microbatches: per update and replica; pipeline_idle: share of an update that a pipeline rank waits.
    """

    prompts: int
    sequences: int
    updates: int
    sequences_per_update: int
    sequences_per_rank: int
    longest: int
    context: int
    tokens_per_microbatch: int
    microbatches: int
    pipeline_idle: float


def plan_batch(settings: Settings, max_positions: int) -> BatchPlan:
    """The batch of these settings. max_positions: that of the model."""
    training, parallel, sequences = settings.training, settings.parallel, settings.sequences
    update = sequences // settings.minibatches
    per_rank = -(-update // parallel.data)
    longest = min(settings.longest, max_positions)
    filled = padded_length(longest, parallel.context)
    in_one = max(1, training.tokens_per_microbatch // filled)
    tokens = max(min(training.tokens_per_microbatch, per_rank * filled), filled)
    each = settings.precision.token_multiple(parallel)
    align = math.lcm(each * parallel.context, sequence_multiple(parallel.context))
    packs = -(-update // in_one)
    microbatches = -(-packs // parallel.data)
    # Interleaving splits each rank's work into ``virtual`` chunks, and shortens the bubble accordingly.
    waits = (parallel.pipeline - 1) / parallel.virtual
    return BatchPlan(
        prompts=sequences if settings.sft is not None else settings.rollout.prompts_per_step,
        sequences=sequences,
        updates=settings.minibatches * training.ppo_epochs,
        sequences_per_update=update,
        sequences_per_rank=per_rank,
        longest=longest,
        context=min(max((part.tokens for part in settings.prompt_sets), default=longest), max_positions),
        tokens_per_microbatch=-(-tokens // align) * align,
        microbatches=microbatches,
        pipeline_idle=waits / (microbatches + waits),
    )


@dataclass(frozen=True)
class Gpus:
    """The run's GPUs, by role and by node."""

    total: int
    """A GPU shared by a rank and a worker counts once."""
    trainer: int
    engines: int
    colocated: bool
    nodes: tuple[tuple[int, int], ...]
    """Trainer ranks and engine workers per node, on the fewest nodes; empty: see ``why``."""
    why: str
    """Why they cannot be placed on such nodes; empty if they can."""
    per_node: int
    """GPUs of a node."""


def count_gpus(settings: Settings, per_node: int = 8) -> Gpus:
    """The GPUs that these settings need, and the fewest nodes of ``per_node`` GPUs that provide them."""
    engine = settings.engine
    trainer, workers = settings.parallel.world, engine.replicas * engine.tensor
    total = trainer if engine.colocated else trainer + workers
    fewest = -(-total // per_node)
    why = ""
    for count in range(fewest, 2 * fewest + 1):
        try:
            shares = [assign_node(settings, node, count) for node in range(count)]
            for share in shares:
                refuse_idle_gpus(settings, share, per_node)
        except UserError as e:
            why = why or str(e)
            continue
        nodes = tuple((len(share.ranks), len(share.engines) * share.workers(settings)) for share in shares)
        used = max(max(held) if engine.colocated else sum(held) for held in nodes)
        if used <= per_node:
            return Gpus(total, trainer, workers, engine.colocated, nodes, "", per_node)
        why = why or f"on {count} nodes, one would have {used}"
    return Gpus(total, trainer, workers, engine.colocated, (), why, per_node)


def sharing_pays(settings: Settings, shape: ModelShape) -> bool:
    """Whether shared prompts save more on a GPU than they cost, in sequences of full length.

    Saved are a group's products for all prompts but one. Attention is FlashAttention 2's instead of cuDNN's,
    which takes about twice as long on Hopper.
    """
    prompt, samples = settings.data.max_prompt_tokens, settings.rollout.samples_per_prompt
    tokens = prompt + settings.rollout.max_response_tokens
    return prompt * (1 - 1 / samples) >= tokens**2 / shape.attention_length

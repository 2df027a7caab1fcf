"""Command line and environment of a vLLM server, from the settings of a run.

vLLM is unmodified, and is not imported here. Our additions (weight transfer, authentication of every route)
are in ``bridge/vllm/plugin.py`` and are enabled by flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.config.cluster import BRIDGE_VARIABLE, TOKEN_VARIABLE
from rpg_megatron.engine.arguments import reduces_on_gpus, uses_flashinfer
from rpg_megatron.system.dtypes import ITEM_BYTES

SERVED_NAME = "policy"
"""Name under which an engine serves the model."""

CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with the number of a GPU's hardware queues that a process uses."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that chooses vLLM's model runner: 0 is V1; unset, vLLM takes V2 on a GPU."""
KEEP_ALIVE_SECONDS = 600
"""How long an engine keeps an idle connection. Clients close theirs much sooner, to avoid a race."""

_PLUGIN = "rpg_megatron.bridge.vllm.plugin"
_TRANSFER = '{"backend": "rpg_pull"}'
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_GIB = 1024**3
_ENGINE_MODULES = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
    "in_proj_qkvz": "in_proj_qkvz",
    "in_proj_ba": "in_proj_ba",
    "out_proj": "out_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "lm_head": "lm_head",
}
"""Target of an adapter -> vLLM's module, which may have several projections."""
_KEPT_BYTES = 4 << 30
"""Maximum freed memory that an engine on a CPU keeps for its next sync."""


def kv_bytes_per_token(settings: Settings, shape: ModelShape) -> int:
    """Bytes of a token's keys and values in one engine worker.

    In 16 bits on a GPU latent attention keeps the latent, all of it on each worker.
    """
    columns = 2 * max(1, shape.num_kv_heads // settings.engine.tensor) * shape.head_dim
    if shape.latent is not None and settings.device == "cuda" and settings.precision.dtype != "float32":
        columns = shape.latent.rank + shape.latent.rotated_dim
    return shape.softmax_layers * columns * ITEM_BYTES[settings.precision.dtype]


def context_length(settings: Settings, shape: ModelShape | None = None) -> int:
    """Maximum tokens of prompt and response together: what the settings need, up to the model's positions.

    shape: the model's; None: it is read. Raises UserError if the longest allowed prompt leaves no room for a
    response.
    """
    longest = max(settings.prompt_sets, key=lambda part: part.data.max_prompt_tokens)
    where, prompt = longest.where, longest.data.max_prompt_tokens
    limit = (shape or read_model_shape(settings.model.path)).max_positions
    if prompt >= limit:
        raise UserError(
            f"{where}.max_prompt_tokens: prompts of up to {prompt} tokens leave no room for a response: "
            f"the model has {limit} positions (max_position_embeddings); set it below {limit}"
        )
    return min(max(part.tokens for part in settings.prompt_sets), limit)


def engine_command(
    settings: Settings,
    index: int,
    socket: Path,
    *,
    weights: Literal["dummy", "checkpoint"] = "dummy",
    listen: tuple[str, int] | None = None,
) -> list[str]:
    """Command line of engine ``index``. It listens on a unix socket, or at ``listen`` (address, port).

    weights: "dummy" starts with random weights, which the first sync replaces, so only the trainers read the
    checkpoint; "checkpoint" lets vLLM load it, for an evaluation without trainers.
    """
    engine, shape = settings.engine, read_model_shape(settings.model.path)
    command = [sys.executable, "-m", "rpg_megatron.engine.server"]
    command += ["--model", str(settings.model.path), "--served-model-name", SERVED_NAME]
    command += ["--host", listen[0], "--port", str(listen[1])] if listen else ["--uds", str(socket)]
    command += ["--dtype", settings.precision.dtype]
    command += ["--load-format", "dummy" if weights == "dummy" else "safetensors"]
    command += ["--tensor-parallel-size", str(engine.tensor)]
    command += ["--max-model-len", str(context_length(settings, shape))]
    if shape.is_part:  # without the vision tower, whose inputs would be processed besides
        command += ["--language-model-only"]
    if shape.fp8_files:  # the trainers send bfloat16
        command += ["--hf-overrides", '{"quantization_config": null}']
    if shape.linear is not None:
        # The trainer's rule has its state in float32. Cached prefixes would need copies of the states, and
        # prompts that are split at blocks; but on a GPU vLLM stores routes by their blocks.
        command += ["--mamba-ssm-cache-dtype", "float32"]
        if settings.device == "cpu" or settings.training.router_replay == "off":
            command += ["--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(engine.most_sequences)]
    # numpy accepts no larger seed; requests have their own seeds.
    command += ["--seed", str((settings.seed + index) % 2**32)]
    # Sampling parameters come only from the request, not from the checkpoint's generation_config.json.
    command += ["--generation-config", "vllm"]
    # After temperature, since the trainer recomputes log softmax(logits / temperature); and after top-p,
    # top-k and min-p, as the correction needs them.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--middleware", f"{_PLUGIN}.BearerAuth"]
    command += ["--worker-extension-cls", f"{_PLUGIN}.WorkerExtension"]
    command += ["--weight-transfer-config", _TRANSFER]
    command += ["--disable-uvicorn-access-log"]
    if (lora := settings.lora) is not None and settings.serves_adapters and weights == "dummy":
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(lora.engine_rank)]
        modules = dict.fromkeys(_ENGINE_MODULES[name] for name in lora.names_in(shape))
        command += ["--lora-target-modules", *modules]
    if settings.training.router_replay == "rollout":
        command += ["--enable-return-routed-experts"]
    if settings.device == "cpu":
        command += ["--enforce-eager"]
        if engine.tensor == 1:
            # vLLM starts even a single CPU worker as a separate process, to bind its threads. We do not bind
            # threads; without that process the engine starts faster and batches are not copied.
            command += ["--distributed-executor-backend", _ONE_PROCESS]
        # When a prompt is split over two batches, vLLM rewinds the random generator. CPU generators do not
        # support that, and a seeded request would end the engine. So prompts are not split.
        command += ["--no-enable-chunked-prefill"]
        command += [
            "--max-num-batched-tokens",
            str(max(context_length(settings, shape), engine.most_sequences, 8192)),
        ]
    if reduces_on_gpus(settings) and not uses_flashinfer(settings):
        # One option, which a value of the user's replaces as a whole (``check_engine_arguments``).
        command += ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}']
    if settings.device == "cuda" and engine.colocated:
        # By default vLLM takes a share of the whole GPU, most of which the trainer needs, so the KV cache is
        # set in bytes. It also refuses to start if less than its share is free, as after a restart.
        command += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.05"]
        command += ["--sleep-mode-offload-cudagraph"]  # woken with the weights
    if engine.quantization is not None:
        command += ["--quantization", engine.quantization]
    if settings.device == "cpu" or engine.colocated:
        command += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * _GIB))]
    return command + list(engine.arguments)


def span_arguments(parts: int, part: int, master: tuple[str, int]) -> list[str]:
    """More of the command line of an engine on several nodes, for one of its processes.

    part: 0 is the server, others have workers only. master: where the workers find each other, an address and
    a free port of the server's node.
    """
    arguments = ["--nnodes", str(parts), "--node-rank", str(part), "--distributed-executor-backend", "mp"]
    arguments += ["--master-addr", master[0], "--master-port", str(master[1])]
    return arguments + ["--headless"] * (part > 0)


def engine_environment(
    settings: Settings, index: int, bridge_dir: Path, token: str, gpus: Sequence[int] = (0,)
) -> dict[str, str]:
    """Full environment of an engine: this process's, with vLLM's variables set and conflicting ones removed.

    gpus: GPUs of the node that the engine sees; vLLM computes on the first ones, one a worker.
    """
    environment = dict(os.environ)
    # VLLM_API_KEY would require a second token; VLLM_CPU_KVCACHE_SPACE (whole GiB) would override the flag.
    # The number of GPU queues is set for Megatron, also by users. With a single queue, vLLM's copies and the
    # links to the trainers, which have streams of their own, would wait for each other.
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", CONNECTIONS_VARIABLE):
        environment.pop(name, None)
    environment |= {
        TOKEN_VARIABLE: token,
        BRIDGE_VARIABLE: str(bridge_dir),
        "PYTHONSAFEPATH": "1",  # also for vLLM's own processes: no imports from the working directory
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that pause an engine and change its weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # on several nodes, the launcher sets the cluster's interface
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cuda" and settings.precision.dtype == "float32":
        # vLLM's attention for float32 is a Triton kernel, whose matrix products would otherwise use TF32. For
        # latents there is none in float32.
        environment |= {"TRITON_F32_DEFAULT": "ieee", "VLLM_MLA_DISABLE": "1"}
    if settings.device == "cuda":
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
        environment["VLLM_ALLREDUCE_USE_FLASHINFER"] = str(int(uses_flashinfer(settings)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[i].strip() if len(visible) > i else str(i) for i in gpus
        )
    if settings.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(engine_threads(settings)),
            # Idle threads yield their core, because trainer and engine alternate on the same cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            # vLLM's binding would pin every engine to the same cores; it refuses two workers on one NUMA
            # node.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Latent attention as plain attention: a CPU has kernels of a few sizes for latents.
            "VLLM_MLA_DISABLE": "1",
            # Even eager mode would compile a few small sampler functions with a C++ compiler, which takes
            # longer than the rest of the start. The second spares the import of the compiler.
            "TORCH_COMPILE_DISABLE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            # Each sync needs scratch memory of the size of the largest module, and memory for packed weights.
            # Let malloc keep freed memory: new pages from the kernel take longer than the copy.
            "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
        }
    return environment


def engine_threads(settings: Settings) -> int:
    """Compute threads of one engine worker on a CPU. With ``rollout.ahead``, when the trainer computes at the
    same time, the engines have half of the cores.
    """
    workers = settings.engine.replicas * settings.engine.tensor
    cores = len(os.sched_getaffinity(0)) // (2 if settings.rollout.ahead else 1)
    return settings.engine.cpu_threads or max(1, cores // workers)

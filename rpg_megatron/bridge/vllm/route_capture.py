"""Captures the chosen experts on a CPU: vLLM does this in its router, which its CPU kernel does not call.

Without this, an engine on a CPU returns zeros as routes. The choice is computed a second time, with the same
function and inputs as in the kernel.
"""

from __future__ import annotations

from typing import Any

import torch


def capture_routes(model: torch.nn.Module) -> int:
    """Let the expert layers of a model on a CPU pass their choice to vLLM; returns the number of layers.

    vLLM sets the router's ``capture_fn`` later, when it has allocated a buffer for the routes.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [m for m in model.modules() if isinstance(m, MoERunner) and m.is_monolithic]
    for runner in runners:
        _capture(runner.router, runner.routed_experts)
    return len(runners)


def _capture(router: Any, experts: Any) -> None:
    """Wrap the layer's ``forward_monolithic``; weights and kernel may still be replaced later."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    original = experts.forward_monolithic

    def forward_monolithic(x: Any, router_logits: Any, input_ids: Any = None) -> Any:
        if (capture := getattr(router, "capture_fn", None)) is not None:
            _, chosen = select_experts(
                hidden_states=x,
                router_logits=router_logits,
                top_k=experts.top_k,
                use_grouped_topk=experts.use_grouped_topk,
                renormalize=experts.renormalize,
                topk_group=experts.topk_group,
                num_expert_group=experts.num_expert_group,
                custom_routing_function=experts.custom_routing_function,
                scoring_func=experts.scoring_func,
                routed_scaling_factor=experts.routed_scaling_factor,
                e_score_correction_bias=experts.e_score_correction_bias,
            )
            capture(chosen)
        return original(x=x, router_logits=router_logits, input_ids=input_ids)

    experts.forward_monolithic = forward_monolithic

"""Live weights, from Megatron's ranks into vLLM's workers."""

"""Moving weights between Megatron shards, Hugging Face checkpoints and vLLM engines."""

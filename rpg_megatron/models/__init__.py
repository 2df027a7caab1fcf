"""Model families: Hugging Face tensors against Megatron's shards. No torch."""

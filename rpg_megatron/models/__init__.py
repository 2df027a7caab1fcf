"""Model families: mappings between Hugging Face tensors and Megatron's shards. No torch."""

"""The Megatron model on a rank: micro-batches, log-probs, updates."""

"""Checkpoints on disk: Hugging Face's format and Megatron's."""

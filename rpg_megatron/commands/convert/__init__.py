"""``rpg-megatron convert``: between Hugging Face's and Megatron's checkpoints."""

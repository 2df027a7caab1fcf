"""``rpg-megatron replay``: train a step again from its rollouts."""

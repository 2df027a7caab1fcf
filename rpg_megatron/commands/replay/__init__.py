"""``rpg-megatron replay``: repeats the training of a step from its saved rollouts."""

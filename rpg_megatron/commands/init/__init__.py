"""``rpg-megatron init``: a config, data and a reward function to start from."""

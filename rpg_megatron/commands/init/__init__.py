"""``rpg-megatron init``: a config, data and a reward of one's own to begin with."""

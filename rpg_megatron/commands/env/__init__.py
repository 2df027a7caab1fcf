"""``rpg-megatron env``: checks of environments."""

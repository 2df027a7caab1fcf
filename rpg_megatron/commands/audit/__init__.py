"""``rpg-megatron audit``: where engine and trainer differ."""

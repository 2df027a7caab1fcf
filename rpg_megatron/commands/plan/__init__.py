"""``rpg-megatron plan``: estimates memory and time of a run by arithmetic, without GPU and torch."""

"""``rpg-megatron eval``: from options to settings, a folder that is gone on with, processes, a table."""

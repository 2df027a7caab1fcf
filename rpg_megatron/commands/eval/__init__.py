"""``rpg-megatron eval``: options, settings, the resumable output folder, processes, the table."""

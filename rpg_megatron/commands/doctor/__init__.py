"""``rpg-megatron doctor``: checks whether this machine, or every node of a job, can run the settings."""

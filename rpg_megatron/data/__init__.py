"""Problems, prompts, packing, trajectories, and their files."""

"""Problems, prompts, sequence packing, trajectories, and their files."""

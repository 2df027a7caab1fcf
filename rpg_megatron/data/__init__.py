"""Data: problems, prompts, sequence packing, trajectories, and their files."""

"""Prompts, trajectories and results."""

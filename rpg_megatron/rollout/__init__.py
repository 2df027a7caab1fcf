"""Prompts in, trajectories out: sampler, dynamic sampling, engine pool."""

"""Rollouts: sampler process, engine pool, generation, dynamic sampling."""

"""Rollouts: the sampler process, generation on the engine pool, dynamic sampling, held-out evaluation."""

"""Engines, their client, and the sampler that feeds them."""

"""Experiment trackers, which log metrics, settings and responses of a run. Each has its own process."""

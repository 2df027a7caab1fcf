"""Experiment trackers, which log metrics, settings and responses of a run. Each has a thread of rank 0."""

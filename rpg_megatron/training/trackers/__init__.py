"""Trackers: metrics, settings and responses of a run, logged live. Each has a process of its own."""

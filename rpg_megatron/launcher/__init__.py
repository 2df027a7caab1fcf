"""A run's processes on all its nodes: start, supervise, resume, stop."""

"""Utilities: collectives over the control group, process groups of the OS, events, dtypes, atomic files."""

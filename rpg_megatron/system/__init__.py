"""Processes and their groups, events, small collectives."""

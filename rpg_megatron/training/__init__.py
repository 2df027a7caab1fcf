"""The training loop, and what one rank needs for it."""

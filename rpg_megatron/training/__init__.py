"""The training loop and everything one trainer rank needs for it."""

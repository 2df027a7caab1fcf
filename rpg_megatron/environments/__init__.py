"""Environments that come with the package: episodes, and sources of their prompts."""

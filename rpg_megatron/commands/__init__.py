"""What each ``rpg-megatron`` command does."""

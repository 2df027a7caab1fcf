"""``rpg-megatron report``: an HTML report of one or more runs."""

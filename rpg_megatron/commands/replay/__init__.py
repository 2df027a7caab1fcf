"""``rpg-megatron replay``: repeats the training of a step from its saved rollouts."""

REQUEST, REPORT = "replay_request.json", "replay.json"
"""Files in the replay's folder: what the launcher asks for, and what rank 0 found."""

RANK = "rpg_megatron.commands.replay.rank"
"""What each rank runs."""

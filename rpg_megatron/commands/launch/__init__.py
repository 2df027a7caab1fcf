"""``rpg-megatron launch``: jobs by NeMo-Run."""

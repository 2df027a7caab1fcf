"""What a run will hold in memory, and whether it fits: arithmetic alone, without a GPU and without torch."""

"""From one command to all the processes of a run, and back to none."""

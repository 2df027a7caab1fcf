"""Whether a machine, or every node of a job, can run what the settings ask for. Imports no torch itself."""

"""CPU collectives, OS process groups, progress events, atomic files, standard streams."""

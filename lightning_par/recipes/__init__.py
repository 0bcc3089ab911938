"""Plain models and data to train: ordinary torch and Lightning code, with no word of parallelism in it."""

"""What recipes.benchmark measures; nothing here imports torch before a measurement is chosen."""

STEPS_PER_UPDATE = 10  # of the training loops

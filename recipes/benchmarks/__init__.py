"""The measurements of recipes.benchmark. This file must not import torch, so that --help is fast."""

STEPS_PER_UPDATE = 10  # env steps per update in the training loops

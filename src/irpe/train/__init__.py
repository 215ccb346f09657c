"""Training and evaluation: data, loop, checkpoints, runs and ablations."""

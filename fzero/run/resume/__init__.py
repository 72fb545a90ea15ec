"""Checkpoints while training, loading the newest sound state, resuming by the same command, rollbacks."""

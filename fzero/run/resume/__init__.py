"""How a run survives: checkpoints while training, the newest sound state, the same command again, rollbacks."""

"""A run itself: the loop, checkpoints while training, resuming by the same command, rollbacks, evaluation, samples."""

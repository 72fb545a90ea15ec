"""Looking at runs afterwards: a step again, where two runs part, what checkpoints hold and how they differ."""

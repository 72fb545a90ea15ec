"""Reports of runs: predicted and measured numbers, with pictures."""

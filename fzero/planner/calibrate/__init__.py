"""Measure how long this machine takes for its operations, for plans: `fzero bench` writes the device file."""

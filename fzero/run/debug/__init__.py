"""Inspect finished runs: replay a step, find where two runs part, list and compare checkpoints."""

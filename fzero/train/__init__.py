"""The training step as a function. Read step.py first."""

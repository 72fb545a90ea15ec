"""Predict a run before it runs, from its own step on fake tensors."""

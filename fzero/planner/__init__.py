"""A run before it runs: its own step on fake tensors, and what follows from that."""

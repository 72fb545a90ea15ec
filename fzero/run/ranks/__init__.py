"""The processes of a run: rendezvous, agreement, signals, hangs, and a common end."""

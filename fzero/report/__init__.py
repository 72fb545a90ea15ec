"""Pictures and numbers of runs."""

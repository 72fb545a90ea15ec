"""The `fzero` command: argument parsing, nothing else."""

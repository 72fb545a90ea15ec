"""What this machine does in which time, for plans: `fzero bench` measures it and writes the device file (see fzero.planner.devices)."""

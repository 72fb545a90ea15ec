"""The processes of a run: how they find each other, agree, notice signals and hangs, and end together."""

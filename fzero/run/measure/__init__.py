"""The measurements of a run: rows of metrics, time by phase, live bytes, norms, rank times, FLOPs."""

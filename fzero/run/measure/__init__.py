"""What a run measures of itself: rows of metrics, time by phase, live bytes, norms, rank times, FLOPs."""

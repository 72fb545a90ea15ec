"""The measurements of a run: rows of metrics, time by phase, live bytes, norms, rank times, FLOPs."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

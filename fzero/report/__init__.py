"""Reports of runs: predicted and measured numbers, with pictures."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

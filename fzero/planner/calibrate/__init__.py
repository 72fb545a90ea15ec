"""Measure how long this machine takes for its operations, for plans: `fzero bench` writes the device file."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

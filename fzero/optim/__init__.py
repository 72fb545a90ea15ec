"""Optimizers as values: pure transformations of gradients, and schedules as pure functions of the step."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""Predict a run before it runs, from its own step on fake tensors."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

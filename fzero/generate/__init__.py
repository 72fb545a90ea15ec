"""Generation as functions and values: one pure step over pages of keys and values, a scheduler, and draws."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""The models: pure functions over parameter trees."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

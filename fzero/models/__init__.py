"""The models: pure functions over parameter trees."""

from fzero.core.lazy_names import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

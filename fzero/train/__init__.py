"""The training step as a function. Read step.py first."""

from fzero.core.lazy_names import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

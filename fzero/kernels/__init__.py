"""The hot operations, one file each: the formula, the reference that defines the result, and faster forms."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

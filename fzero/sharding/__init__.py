"""Where every leaf lives: meshes, specs, rules and plans as values."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

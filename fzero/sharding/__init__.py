"""Where every leaf lives: meshes, specs, rules and plans as values."""

from fzero.core.lazy_names import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

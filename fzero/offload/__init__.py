"""A state that does not fit: leaves in host memory or on disk, streamed through bounded buffers."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""Text in, batches out: prepare a corpus once, then draw batches as a pure function of (seed, step)."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

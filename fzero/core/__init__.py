"""Foundations that extend torch: trees, random keys, transforms, compilation, dtypes, storage; no ranks, no models."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

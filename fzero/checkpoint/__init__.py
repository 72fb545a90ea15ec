"""Checkpoints of a state tree: written by all ranks during training, complete or absent, restored on any mesh."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

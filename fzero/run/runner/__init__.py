"""A run itself: the loop, checkpoints while training, resuming by the same command, rollbacks, evaluation, samples."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""The loop, checkpoints, resuming, rollbacks, evaluation; and finished runs: replay, bisect, lists of checkpoints."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

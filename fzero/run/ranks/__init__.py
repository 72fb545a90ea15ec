"""The processes of a run: rendezvous, agreement, signals, hangs, and a common end."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

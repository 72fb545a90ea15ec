"""A run of `fzero pretrain`. Each folder uses those before it:

config (what it is told to do), ranks (its processes), setup (what it starts from), measure (what it measures and the
memory it needs), runner (the loop), debug (runs seen from outside).
"""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

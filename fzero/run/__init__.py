"""A run of `fzero pretrain`. Each folder uses those before it:

config (what it is told to do), setup (what it starts from, and its processes), measure (what it measures and the
memory it needs), runner (the loop; and finished runs: a step again, two runs beside each other, their checkpoints).
"""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

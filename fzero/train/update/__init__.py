"""The second half of a step: from summed gradients to the new state, in memory, offloaded, or in the backward pass."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

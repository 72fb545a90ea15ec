"""Inspect finished runs: replay a step, find where two runs part, list and compare checkpoints."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

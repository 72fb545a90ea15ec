"""What a run starts from: folder, machine, corpus, weights, vocabulary, and the step that a config describes."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

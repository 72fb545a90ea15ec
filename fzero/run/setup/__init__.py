"""What a run starts from: processes, folder, machine, corpus, weights, vocabulary, and the step of its config."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

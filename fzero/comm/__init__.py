"""Communication between ranks: collectives, the messages below them, the ledger of bytes, the agreement check."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""fzero: ZeRO-style large-model training as pure functions over parameter pytrees.

Names load when first used, so that `fzero --help` does not wait for torch.
"""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"

"""What a run is told to do: the keys of a config, their values, versions and checks, and DeepSpeed's names for them."""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

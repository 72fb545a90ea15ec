"""Import weights that other systems saved, as leaves of ours that are read one at a time.

The content of a folder tells its kind: a model that `transformers` saved, a `torch.distributed.checkpoint`, or a
DeepSpeed universal checkpoint. The last two need a config.json of `transformers`.
"""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

"""Pipeline schedules as values: which rank computes what, in which order, and how long that takes.

A model's layers are cut into stages (`layout`), which are on the ranks of pp. `schedule` orders the work of each rank
in a step of several micro-batches, `print` draws it, `play` says when everything happens for given times. A table of
one's own (`read_schedule`) is a schedule if `check` finds no fault. Nothing here computes or sends anything.

>>> from fzero.sharding import pipeline
>>> s = pipeline.schedule("zb-h1", pipeline.layout([1.0] * 8, p=4), parts=4)
>>> pipeline.play(s, {"F": 1.0, "I": 1.0, "W": 1.0}).step
15.0
"""

from fzero.core.packages import attach

__all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]

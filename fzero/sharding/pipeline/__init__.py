"""Pipeline schedules as values: which rank computes what, in which order, and how long that takes.

A model's layers are cut into stages (`layout`), which are on the ranks of pp. `schedule` orders the work of each rank
in a step of several micro-batches, `print` draws it, `play` says when everything happens for given times. A table of
one's own (`read_schedule`) is a schedule if `check` finds no fault. Nothing here computes or sends anything.

>>> from fzero.sharding import pipeline
>>> s = pipeline.schedule("zb-h1", pipeline.layout([1.0] * 8, p=4), parts=4)
>>> pipeline.play(s, {"F": 1.0, "I": 1.0, "W": 1.0}).step
15.0
"""

from fzero.sharding.pipeline.check import check, with_updates
from fzero.sharding.pipeline.gathers import count_gathers, with_gathers
from fzero.sharding.pipeline.orders import FAMILIES, schedule
from fzero.sharding.pipeline.play import Played, play
from fzero.sharding.pipeline.schedule_text import read_schedule, write_schedule
from fzero.sharding.pipeline.stages import layout, read_layout, split_layers, stage_ranks
from fzero.sharding.pipeline.table import Act, Schedule, Stages, feeds, needs

__all__ = [
    "FAMILIES",
    "Act",
    "Played",
    "Schedule",
    "Stages",
    "check",
    "count_gathers",
    "feeds",
    "layout",
    "needs",
    "play",
    "read_layout",
    "read_schedule",
    "schedule",
    "split_layers",
    "stage_ranks",
    "with_gathers",
    "with_updates",
    "write_schedule",
]

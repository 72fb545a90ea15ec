"""The parallel axes of a mesh: what each splits among its ranks. It imports no torch, so what only shows a mesh need
not either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

DP, RP, TP, PP, CP, EP = "dp", "rp", "tp", "pp", "cp", "ep"


class ParallelAxis(NamedTuple):
    """What an axis splits among its ranks, and so how they differ.

    rows: they have other rows of a batch. tokens: other tokens, of other rows or of a part of each. states: ZeRO shards
    over it what they would all hold. varying: they use leaves that they all hold differently, so that gradients are
    summed over it.
    """

    splits: str
    rows: bool = False
    tokens: bool = False
    states: bool = False
    varying: bool = True


AXES = {
    DP: ParallelAxis("data, and the shards of ZeRO", rows=True, tokens=True, states=True),
    RP: ParallelAxis("replicas of the dp group (hybrid sharding)", rows=True, tokens=True),
    TP: ParallelAxis("tensor", varying=False),
    PP: ParallelAxis("pipeline"),
    CP: ParallelAxis("context", tokens=True, states=True),
    EP: ParallelAxis("experts", rows=True, tokens=True, states=True),
}
BY_RANK = (PP, RP, DP, EP, CP, TP)  # as ranks are numbered, the outermost first: axes that communicate most are nearest
BY_DATA_RANK = tuple(name for name in BY_RANK if AXES[name].rows)
BY_TOKENS = tuple(name for name in BY_RANK if AXES[name].tokens)
SHARDS = tuple(name for name in BY_RANK if AXES[name].states)  # where several are in use, one link of all their ranks
VARYING = tuple(name for name in (DP, RP, EP, CP, PP, TP) if AXES[name].varying)  # as sums of gradients are made


def links_of(axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The links that communicate over `axes`: those of size above 1, and one in place of several of dp, ep and cp,
    such as "dp+cp", whose ranks are numbered as by all of them, dp first.

    >>> links_of(("dp", "rp", "cp"), {"dp": 2, "rp": 2, "cp": 2}), links_of(("dp", "cp"), {"dp": 2, "cp": 1})
    (['dp+cp', 'rp'], ['dp'])
    """
    used = [axis for axis in axes if sizes[axis] > 1]
    joined = [axis for axis in SHARDS if axis in used]
    if len(joined) < 2:
        return used
    return ["+".join(joined) if axis == joined[0] else axis for axis in used if axis not in joined[1:]]


def joined_links(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes of each link of several on a mesh: of those over which ZeRO shards dense leaves, and experts, which ep
    shards already.

    >>> joined_links({"dp": 2, "ep": 2, "cp": 2}), joined_links({"dp": 1, "ep": 2, "cp": 2})
    ([('dp', 'ep', 'cp'), ('dp', 'cp')], [('ep', 'cp')])
    """
    used = [axis for axis in SHARDS if sizes[axis] > 1]
    axis_sets = dict.fromkeys((tuple(used), tuple(axis for axis in used if axis != EP)))
    return [axes for axes in axis_sets if len(axes) > 1]


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Format the sizes of a mesh, without axes of one rank.

    >>> mesh_text({"dp": 8, "tp": 2, "pp": 1}), mesh_text({"dp": 1}), mesh_text({})
    ('dp=8 tp=2', 'one process', 'one process')
    """
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"

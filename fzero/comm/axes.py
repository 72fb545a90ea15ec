"""The parallel axes of a mesh: what each splits among its ranks. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero.core.text_parsing import expect_entries

DP, RP, TP, PP, CP, EP = "dp", "rp", "tp", "pp", "cp", "ep"


# depth: ranks are numbered with the axes of the least depth outermost, so that those that communicate most are nearest.
# rows, tokens: the ranks have other rows, or other tokens, of a batch. states: ZeRO shards over it. summed: its number
# in the order of the gradient sums over ranks that use a leaf differently; None: they use it alike.
class ParallelAxis(NamedTuple):
    """What an axis splits among its ranks, and so how they differ."""

    splits: str
    depth: int
    rows: bool = False
    tokens: bool = False
    states: bool = False
    summed: int | None = None


class Axes(dict[str, ParallelAxis]):
    """The axes of every mesh by name, and the groups of them that follow from their values.

    >>> AXES.by_rank, AXES.shards
    (('pp', 'rp', 'dp', 'ep', 'cp', 'tp'), ('dp', 'ep', 'cp'))
    """

    @property
    def by_rank(self) -> tuple[str, ...]:
        """All of them, as ranks are numbered, the outermost first."""
        return tuple(sorted(self, key=lambda name: self[name].depth))

    @property
    def by_data_rank(self) -> tuple[str, ...]:
        """Those whose ranks have other rows, the outermost first."""
        return tuple(name for name in self.by_rank if self[name].rows)

    @property
    def by_tokens(self) -> tuple[str, ...]:
        """Those whose ranks have other tokens, the outermost first."""
        return tuple(name for name in self.by_rank if self[name].tokens)

    @property
    def shards(self) -> tuple[str, ...]:
        """Those over which ZeRO shards: where several are in use, one link of all their ranks."""
        return tuple(name for name in self.by_rank if self[name].states)

    @property
    def varying(self) -> tuple[str, ...]:
        """Those over which gradients are summed, in the order of the sums."""
        order = {name: axis.summed for name, axis in self.items() if axis.summed is not None}
        return tuple(sorted(order, key=order.__getitem__))


AXES = Axes(
    {
        DP: ParallelAxis("data, and the shards of ZeRO", 2, rows=True, tokens=True, states=True, summed=0),
        RP: ParallelAxis("replicas of the dp group (hybrid sharding)", 1, rows=True, tokens=True, summed=1),
        TP: ParallelAxis("tensor", 5),
        PP: ParallelAxis("pipeline", 0, summed=4),
        CP: ParallelAxis("context", 4, tokens=True, states=True, summed=3),
        EP: ParallelAxis("experts", 3, rows=True, tokens=True, states=True, summed=2),
    }
)


def links_of(axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The links that communicate over `axes`, of size above 1; several of dp, ep and cp are one, such as "dp+cp".

    >>> links_of(("dp", "rp", "cp"), {"dp": 2, "rp": 2, "cp": 2}), links_of(("dp", "cp"), {"dp": 2, "cp": 1})
    (['dp+cp', 'rp'], ['dp'])
    """
    used = [axis for axis in axes if sizes[axis] > 1]
    # One collective over all their ranks takes the place of one over each axis.
    joined = [axis for axis in AXES.shards if axis in used]
    if len(joined) < 2:
        return used
    return ["+".join(joined) if axis == joined[0] else axis for axis in used if axis not in joined[1:]]


def joined_links(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes of each link that joins several: of the shards of dense leaves, and of those of experts.

    >>> joined_links({"dp": 2, "ep": 2, "cp": 2}), joined_links({"dp": 1, "ep": 2, "cp": 2})
    ([('dp', 'ep', 'cp'), ('dp', 'cp')], [('ep', 'cp')])
    """
    used = [axis for axis in AXES.shards if sizes[axis] > 1]
    axis_sets = dict.fromkeys((tuple(used), tuple(axis for axis in used if axis != EP)))
    return [axes for axes in axis_sets if len(axes) > 1]


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Format the sizes of a mesh, without axes of one rank.

    >>> mesh_text({"dp": 8, "tp": 2, "pp": 1}), mesh_text({"dp": 1}), mesh_text({})
    ('dp=8 tp=2', 'one process', 'one process')
    """
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"


def expect_mesh(sizes: dict[str, Any]) -> None:
    """Raise ValueError if these are not the sizes of a mesh's axes."""
    for name, size in sizes.items():
        expect_entries(sizes, {name: int}, "its mesh")
        if not 1 <= size < 1 << 31:
            raise ValueError(f"its mesh has {name}={size}")

"""A layered model as parts, which a pass runs one after the other, and those of a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fzero.core import pytree
from fzero.core.stack import in_turn
from fzero.models import base
from fzero.sharding import Plan
from fzero.sharding.prefetch import Group


class Part(NamedTuple):
    """A part of a layered model: a stack of layers, or a function that a pass calls once."""

    kind: str  # "embed", "join", "block" or "head"
    name: str
    functions: tuple[Callable[..., Any], ...]  # of a stack, those that its layers take in turn; else one
    leaves: tuple[str, ...]  # full names, frozen ones first
    depth: int = 0  # the layers of a stack; 0 for a function that is called once
    first: int = 0  # the number of its first layer among those of all stacks
    at: int = 0  # the number of its first layer among those that this rank holds of its stack

    @property
    def groups(self) -> list[Group]:
        """The leaves that are fetched together: each layer, or all of its leaves."""
        return [Group(self.name, self.leaves, self.at + i if self.depth else None) for i in range(self.depth or 1)]


def parts_of(model: base.Model, plan: Plan, layers: int = 0) -> tuple[Part, ...]:
    """The parts of a model, in the order of a forward pass. layers: only the first ones of the deepest stack; 0: all.

    Raises ValueError for a leaf outside of them, a stack without leaves, and a shared leaf that is not there."""
    leaves = pytree.named_leaves(plan.like)
    for name in model.shared:
        if name not in leaves:
            raise ValueError(
                f"the model says that its head uses {name!r}, which is no leaf of it{pytree.nearest(name, leaves)}"
            )
    names: dict[str, list[str]] = {}
    for name in leaves:
        names.setdefault(name.split("/")[0], []).append(name)

    def own(name: str, *shared: str) -> tuple[str, ...]:
        return tuple(sorted([*names.pop(name, ()), *shared], key=lambda leaf: leaf not in plan.frozen))

    parts, first = [Part("embed", "embed", (model.embed,), own("embed"))], 0
    for stack in base.stacks_of(model):
        if stack.join is not None:
            parts.append(Part("join", stack.join_name, (stack.join,), own(stack.join_name, *model.shared)))
        if stack.name not in names:
            raise ValueError(f"the model has a stack {stack.name!r} and no leaf under {stack.name}/")
        depth = leaves[names[stack.name][0]].shape[0]
        parts.append(Part("block", stack.name, in_turn(stack.block), own(stack.name), depth, first))
        first += depth
    parts.append(Part("head", "head", (model.head,), own("head", *model.shared)))
    if names:
        places = ", ".join(f"{part.name}/" for part in parts[:-1])
        raise ValueError(
            f"{next(iter(names.values()))[0]}: this layered model's leaves are under {places} and head/; move it, or "
            "train a plain loss function"
        )
    deepest = max(part.depth for part in parts)
    return tuple(part._replace(depth=layers) if layers and part.depth == deepest else part for part in parts)


def stages_of(parts: Sequence[Part], plan: Plan, rank: int | None = None) -> dict[int, tuple[Part, ...]]:
    """{number of a stage: its parts} of the stages of a rank of pp (None: of this one); without pp all parts are stage
    0.

    A stage holds the parts of its layers, of one stack or several; a join is with the first layer behind it, the
    embedding in the first stage and the head in the last one.
    """
    if plan.stages is None:
        return {0: tuple(parts)}
    out, count, rank = {}, len(plan.stages.layers), plan.mesh["pp"].rank if rank is None else rank
    for stage in plan.stages.chunks(rank):
        low, high = plan.stages.layers[stage][0], plan.stages.layers[stage][-1] + 1
        mine: list[Part] = []
        for i, part in enumerate(parts):
            behind = parts[i + 1].first if part.kind == "join" else 0
            if part.kind in ("embed", "head"):
                mine += [part] if stage == (0 if part.kind == "embed" else count - 1) else []
            elif part.kind == "join":
                mine += [part] if low <= behind < high else []
            elif low < part.first + part.depth and part.first < high:
                first, end = max(low, part.first), min(high, part.first + part.depth)
                turn = (first - part.first) % len(part.functions)
                rows = plan.leaves[part.leaves[0]].params.rows[rank]
                functions = (*part.functions[turn:], *part.functions[:turn])
                at = rows.index(first - part.first)
                mine.append(part._replace(functions=functions, depth=end - first, first=first, at=at))
        out[stage] = tuple(mine)
    return out

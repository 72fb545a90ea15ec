"""The communication of a leaf's gradient, from its specs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fzero.comm.rank_tables import BY_TOKENS, links_of
from fzero.sharding.spec import Spec
from fzero.sharding.zero_specs import shard_axes

Plan = Any  # fzero.sharding.plan.Plan, which prints them
Moves = tuple[tuple[str, str], ...]  # (operation, link: see tables.links_of)
COLLECTIVES = {"scatter": "psum_scatter", "psum": "psum", "gather": "all_gather"}  # by operation


def moves(compute: Spec, grads: Spec, opt: Spec, sizes: Mapping[str, int]) -> tuple[Moves, Moves]:
    """The communication of a leaf's gradient: (after each micro-batch, once after the last)."""
    partial_links = [(link, link.partition("+")[0]) for link in links_of(compute.partial_axes, sizes)]
    micro_path = [
        ("scatter" if axis in grads.axes else "psum", link) for link, axis in partial_links if axis not in grads.partial
    ]
    end = [
        ("scatter" if axis in opt.axes and axis not in grads.axes else "psum", link)
        for link, axis in partial_links
        if axis in grads.partial
    ]
    gather_links = links_of(shard_axes(compute), sizes) if "dp" in grads.axes and "dp" not in opt.axes else ()
    end += [("gather", link) for link in gather_links]
    return tuple(micro_path), tuple(end)


def is_coded(op: str, link: str) -> bool:
    """Whether an operation of `moves` sends codes, where a plan's codec has any: a sum over ranks that have other
    tokens."""
    return op in ("scatter", "psum") and link.split("+")[0] in BY_TOKENS


def rounds_once(leaf: Any, sizes: Mapping[str, int]) -> bool:
    """Whether each term of a leaf's gradient is rounded once on every way that it goes in codes: no "psum" does."""
    path = moves(leaf.compute, leaf.grads, leaf.opt, sizes)
    return not any(op == "psum" and is_coded(op, link) for step_path in path for op, link in step_path)


def ranks_of(link: str, sizes: Mapping[str, int]) -> int:
    """The number of ranks of an axis, or of a link such as "dp+cp"."""
    return math.prod(sizes[axis] for axis in link.split("+"))


def without_pp(paths: tuple[Moves, Moves]) -> tuple[Moves, Moves]:
    """The moves of a micro-batch and of a step but those over pp, which are made behind the row of a rank."""
    micro_path, end = (tuple(move for move in path if move[1] != "pp") for path in paths)
    return micro_path, end


def reduce_dtype(plan: Plan) -> torch.dtype:
    """The dtype of gradients on their way."""
    # On one process there is no rank to sum over: one dtype for both is what makes canonical sums agree between meshes.
    return plan.policy.accumulate if plan.reduce == "canonical" else plan.policy.reduce
